"""`shardwise migrate`: rewrite FSDP1 code to FSDP2. Never imports torch."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.lint import SourceFormat
from shardwise.cli.options import drawn_progress

if TYPE_CHECKING:
    from shardwise.fsdp1.codemod.migrate import Migration


class TargetName(enum.StrEnum):
    """API of the rewritten code."""

    TORCH = "torch"
    SHARDWISE = "shardwise"


def migrate(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files and folders, analyzed as one program.")],
    write: Annotated[bool, typer.Option("--write", help="Change the files instead of printing a diff.")] = False,
    target: Annotated[
        TargetName, typer.Option(help="Emit plain torch (fully_shard) or shardwise (sw.shard).")
    ] = TargetName.TORCH,
    verify: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Run COMMAND (as 'torchrun --nproc-per-node 2 train.py --steps 5') on the files before and after, in "
            "copies of the current folder and without GPUs, and compare the losses it prints ('step 3 loss 0.25'). "
            "Exit status 1, and nothing is written, where they differ by more than 0.1%.",
        ),
    ] = None,
    format: Annotated[SourceFormat, typer.Option("--format", help="Output format.")] = SourceFormat.TEXT,
) -> None:
    """Rewrite FSDP1 code to FSDP2, and report code that needs a decision."""
    from shardwise.fsdp1.codemod.migrate import migrate as run
    from shardwise.fsdp1.codemod.migrate import write_migration
    from shardwise.fsdp1.codemod.verifying import verify_migration

    with drawn_progress() as progress:
        migration = run(paths, target=target.value, progress=progress)
    has_run = verify is not None and migration.summary["files_changed"] > 0
    verification = verify_migration(migration, verify) if verify is not None and has_run else None
    is_same = verification is None or verification.is_same
    if write and is_same:
        write_migration(migration)
    _show(migration, format, written=write and is_same)
    if verification is not None:
        typer.echo(str(verification), err=format is not SourceFormat.TEXT)
    raise typer.Exit(1 if migration.summary["needs-decision"] or not is_same else 0)


def _show(migration: Migration, format: SourceFormat, *, written: bool) -> None:
    from rich.console import Console

    from shardwise import __version__
    from shardwise.fsdp1.codemod.draft import finding_kinds
    from shardwise.report.source import findings_github, findings_sarif
    from shardwise.report.terminal import print_migration

    match format:
        case SourceFormat.JSON:
            typer.echo(json.dumps(migration.to_dict(), indent=2))
        case SourceFormat.SARIF:
            typer.echo(findings_sarif(migration.findings, finding_kinds().values(), version=__version__))
        case SourceFormat.GITHUB:
            typer.echo(findings_github(migration.findings))
        case SourceFormat.TEXT:
            print_migration(Console(), migration, written=written)
