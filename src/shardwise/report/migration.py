"""A migration for people: a coloured difference, then what was rewritten and what a person must decide."""

from __future__ import annotations

import difflib

from rich.console import Console
from rich.text import Text

from shardwise.findings import Status
from shardwise.fsdp1.codemod.migrate import MigratedFile, Migration

_HEADINGS = {
    Status.REWRITTEN: ("rewritten", "green"),
    Status.NEEDS_DECISION: ("needs a decision", "yellow"),
    Status.REPORTED: ("worth knowing", "cyan"),
}


def print_migration(console: Console, migration: Migration, *, written: bool) -> None:
    """Print the difference of each file, unless the files on disk have been changed, and the report."""
    if not written:
        for file in migration.files:
            if file.changed:
                console.print(diff_text(file), soft_wrap=True, highlight=False)
    for status, (heading, colour) in _HEADINGS.items():
        found = [finding for finding in migration.findings if finding.status is status]
        if not found:
            continue
        console.print(Text(f"{heading} ({len(found)})", style=f"bold {colour}"))
        for finding in found:
            line = Text(f"  {finding.path}:{finding.line} ")
            line.append(finding.code, style=f"bold {colour}").append(f" {finding.message}")
            if finding.fix:
                line.append("\n    fix: ", style="bold green").append(finding.fix)
            console.print(line, soft_wrap=True, highlight=False)
    summary, verb = migration.summary, "changed" if written else "would change"
    line = f"{summary['files_read']} files read; nothing of FSDP1 in them"
    if migration.files:
        line = f"{summary['constructors_rewritten']} of {summary['constructors']} FSDP(...) calls rewritten; "
        line += f"{summary['files_changed']} of {summary['files_read']} files {verb}; "
        line += f"{summary['needs-decision']} places need a decision"
        line += "" if written or not summary["files_changed"] else "; --write changes them"
    console.print(line, soft_wrap=True, highlight=False)


def diff_text(file: MigratedFile) -> Text:
    """The unified difference of one file, coloured."""
    before, after = file.before.splitlines(keepends=True), file.output.splitlines(keepends=True)
    out = Text()
    for line in difflib.unified_diff(before, after, file.path, file.path):
        style = {"+": "green", "-": "red", "@": "cyan"}.get(line[0], "")
        style = "bold" if line.startswith(("+++", "---")) else style
        out.append(line if line.endswith("\n") else line + "\n\\ no newline at the end\n", style=style)
    return out
