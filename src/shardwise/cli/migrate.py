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
    """What the rewritten code is written in."""

    TORCH = "torch"
    SHARDWISE = "shardwise"


def migrate(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Files and folders, read as one program.")],
    write: Annotated[bool, typer.Option("--write", help="Change the files instead of showing the difference.")] = False,
    target: Annotated[
        TargetName, typer.Option(help="Write plain torch (fully_shard) or shardwise (sw.shard).")
    ] = TargetName.TORCH,
    format: Annotated[SourceFormat, typer.Option("--format", help="How to print the result.")] = SourceFormat.TEXT,
) -> None:
    """Rewrite FSDP1 code to FSDP2, and say what a person must decide."""
    from shardwise.fsdp1.codemod.migrate import migrate as run

    with drawn_progress() as progress:
        migration = run(paths, target=target.value, write=write, progress=progress)
    _show(migration, format, written=write)
    raise typer.Exit(1 if migration.summary["needs-decision"] else 0)


def _show(migration: Migration, format: SourceFormat, *, written: bool) -> None:
    from rich.console import Console

    from shardwise import __version__
    from shardwise.fsdp1.codemod.draft import finding_kinds
    from shardwise.report.migration import print_migration
    from shardwise.report.source import findings_github, findings_sarif

    match format:
        case SourceFormat.JSON:
            typer.echo(json.dumps(migration.to_dict(), indent=2))
        case SourceFormat.SARIF:
            typer.echo(findings_sarif(migration.findings, finding_kinds().values(), version=__version__))
        case SourceFormat.GITHUB:
            typer.echo(findings_github(migration.findings))
        case SourceFormat.TEXT:
            print_migration(Console(), migration, written=written)
