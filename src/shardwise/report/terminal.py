"""Terminal output on the caller's rich Console: progress, errors, `doctor`, `migrate`."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import progress as bars
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.errors import ShardwiseError
from shardwise.findings import Status
from shardwise.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from shardwise.diagnosing.environment import Environment, Measured
    from shardwise.fsdp1.codemod.migrate import MigratedFile, Migration

_ROWS = ("where", "why", "fix")
_PLAIN_LINES = 10


class TerminalProgress:
    """A progress bar in a terminal, or about ten lines in a file or pipe."""

    def __init__(self, console: Console, *, in_bytes: bool = False) -> None:
        self._console, self._in_bytes = console, in_bytes
        self._bars: bars.Progress | None = None
        self._label, self._total, self._done = "", 0, 0
        self._started_s = 0.0

    def start(self, total: int, label: str) -> None:
        """Show an empty bar."""
        self._label, self._total, self._done = label, total, 0
        self._started_s = time.monotonic()
        if self._console.is_terminal:
            counts = (
                (bars.DownloadColumn(), bars.TransferSpeedColumn()) if self._in_bytes else (bars.MofNCompleteColumn(),)
            )
            label_column, note_column = bars.TextColumn("{task.description}"), bars.TextColumn("{task.fields[note]}")
            columns = (label_column, bars.BarColumn(), *counts, bars.TimeRemainingColumn(), note_column)
            self._bars = bars.Progress(*columns, console=self._console)
            self._bars.add_task(label, total=total, note="")
            self._bars.start()

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Move the bar and replace its note."""
        before, self._done = self._done, self._done + steps
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], advance=steps, note=note)
        elif before == 0 or self._tenth(before) != self._tenth(self._done):
            # A note about bytes would repeat the count.
            self._print(f"{self._label} {self._count()}  {'' if self._in_bytes else note}".rstrip())

    def finish(self, note: str = "") -> None:
        """Stop the bar and print the last note under it."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
        if note:
            self._print(note)

    def _count(self) -> str:
        if not self._in_bytes:
            return f"{self._done}/{self._total}"
        rate = self._done / max(time.monotonic() - self._started_s, 1e-6)
        return f"{format_bytes(self._done)} of {format_bytes(self._total)}, {format_bytes(rate)}/s"

    def _tenth(self, done: int) -> int:
        return done * min(_PLAIN_LINES, max(self._total, 1)) // max(self._total, 1)

    def _print(self, line: str) -> None:
        # No wrapping or markup: a log line stays one line, and a [path] is not a style.
        self._console.print(Text(line), soft_wrap=True)


@contextmanager
def progress_on(console: Console, *, in_bytes: bool = False) -> Iterator[TerminalProgress]:
    """Return a context manager of a progress bar, which is also removed after an error."""
    progress = TerminalProgress(console, in_bytes=in_bytes)
    try:
        yield progress
    finally:
        progress.finish()


def print_error(console: Console, error: ShardwiseError) -> None:
    """Print an error: `what` in bold red, then where, why and fix."""
    text = Text.assemble(("error: ", "bold red"), (error.what, "red"))
    for name in _ROWS:
        row = getattr(error, name)
        if row:
            text.append(f"\n  {name + ':':<6} ", style="bold green" if name == "fix" else "bold")
            text.append(row.replace("\n", "\n" + " " * 9))
    console.print(text, soft_wrap=True)


def print_examination(console: Console, environment: Environment, rows: list[Measured], num_ranks: int) -> None:
    """Print the environment, measured collectives and findings of `doctor`."""
    for subject, facts in environment.facts.items():
        if facts:
            console.print(Text(subject, style="bold"))
        for name, value in facts.items():
            shown = format_bytes(value) if name.endswith("_bytes") else value
            console.print(Text(f"  {name.removesuffix('_bytes').replace('_', ' ')}: {shown}"), soft_wrap=True)
    if rows:
        console.print(_bandwidths(rows, num_ranks))
    for finding in environment.findings:
        style = {"error": "bold red", "warning": "yellow"}.get(finding.severity.value, "dim")
        console.print(Text(str(finding), style=style), soft_wrap=True)
    if not environment.findings:
        console.print(Text("nothing wrong was found", style="green"))


def _bandwidths(rows: list[Measured], num_ranks: int) -> Table:
    table = Table(title=f"collectives between {num_ranks} local ranks: time, and bytes of the result a second")
    table.add_column("size", justify="right")
    names = list(dict.fromkeys(row.collective for row in rows))
    for name in names:
        table.add_column(name, justify="right")
    for size in dict.fromkeys(row.num_bytes for row in rows):
        cells = {row.collective: row for row in rows if row.num_bytes == size}
        shown = [
            f"{format_seconds(cells[name].seconds)}, {format_bytes(cells[name].bytes_per_second)}/s"
            if name in cells
            else ""
            for name in names
        ]
        table.add_row(format_bytes(size), *shown)
    return table


_HEADINGS = {
    Status.REWRITTEN: ("rewritten", "green"),
    Status.NEEDS_DECISION: ("needs a decision", "yellow"),
    Status.REPORTED: ("worth knowing", "cyan"),
}


def print_migration(console: Console, migration: Migration, *, written: bool) -> None:
    """Print the report, and the diff of each file unless the files were written."""
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
    """Return the colored unified diff of one file."""
    before, after = file.before.splitlines(keepends=True), file.output.splitlines(keepends=True)
    out = Text()
    for line in difflib.unified_diff(before, after, file.path, file.path):
        style = {"+": "green", "-": "red", "@": "cyan"}.get(line[0], "")
        style = "bold" if line.startswith(("+++", "---")) else style
        out.append(line if line.endswith("\n") else line + "\n\\ no newline at the end\n", style=style)
    return out
