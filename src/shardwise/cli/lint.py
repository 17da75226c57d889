"""`shardwise lint`: find FSDP2 mistakes in source code. No torch."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.findings import Safety

if TYPE_CHECKING:
    from shardwise.findings import SourceFinding
    from shardwise.linting.lint import Linted


class SourceFormat(enum.StrEnum):
    """Output format of findings in source files."""

    TEXT = "text"
    JSON = "json"
    SARIF = "sarif"
    GITHUB = "github"


def lint(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Files, folders, or - for standard input.")],
    select: Annotated[
        list[str] | None, typer.Option(metavar="CODES", help="Codes or prefixes to report, as in SW201,SW22.")
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option(metavar="CODES", help="Codes or prefixes to ignore.")] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Apply safe fixes.")] = False,
    unsafe_fixes: Annotated[bool, typer.Option("--unsafe-fixes", help="Also apply unsafe fixes.")] = False,
    preview: Annotated[bool, typer.Option("--preview", help="Also run preview rules.")] = False,
    format: Annotated[SourceFormat, typer.Option("--format", help="Output format.")] = SourceFormat.TEXT,
) -> None:
    """Find FSDP2 mistakes in source code, without running it."""
    from shardwise.linting.lint import lint_files, settings_for

    settings = settings_for(select=select, ignore=ignore, preview=preview)
    safeties = {Safety.UNSAFE: unsafe_fixes, Safety.SAFE: fix or unsafe_fixes}
    fixes = frozenset(safety for safety, wanted in safeties.items() if wanted)
    linted = lint_files(paths, settings, fixes=fixes)
    if fixes and paths == ["-"]:  # editors expect the fixed text instead of findings
        typer.echo("".join(file.text for file in linted), nl=False)
    else:
        _render(linted, format)
    raise typer.Exit(1 if any(file.findings for file in linted) else 0)


def _render(linted: list[Linted], format: SourceFormat) -> None:
    from shardwise import __version__
    from shardwise.linting.registry import all_rules
    from shardwise.report import source

    findings = [finding for file in linted for finding in file.findings]
    fixed = sum(file.num_fixed for file in linted)
    match format:
        case SourceFormat.TEXT:
            _render_text(linted, findings, fixed)
        case SourceFormat.JSON:
            fixable = sum(bool(finding.edits) for finding in findings)
            typer.echo(source.findings_json(findings, {"findings": len(findings), "fixable": fixable, "fixed": fixed}))
        case SourceFormat.SARIF:
            typer.echo(source.findings_sarif(findings, all_rules().values(), version=__version__))
        case SourceFormat.GITHUB:
            typer.echo(source.findings_github(findings), nl=bool(findings))


def _render_text(linted: list[Linted], findings: list[SourceFinding], fixed: int) -> None:
    from rich.console import Console

    from shardwise.report.source import print_findings

    console = Console()
    print_findings(console, findings, {file.path: file.text for file in linted})
    if fixed:
        console.print(f"{fixed} fixed", style="green", highlight=False)
    if not findings:
        console.print("nothing found")
        return
    safe, unsafe = (
        sum(bool(finding.edits) and finding.safety is safety for finding in findings)
        for safety in (Safety.SAFE, Safety.UNSAFE)
    )
    hint = f"; --fix repairs {safe}" if safe else ""
    hint += f"; --unsafe-fixes repairs {safe + unsafe}" if unsafe else ""
    num_files = sum(bool(file.findings) for file in linted)
    console.print(f"{len(findings)} found in {num_files} file(s){hint}", highlight=False, soft_wrap=True)
