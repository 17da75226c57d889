"""What people see in a terminal: progress bars and errors, drawn by rich on the caller's Console."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress as bars
from rich.console import Console
from rich.text import Text

from shardwise.errors import ShardwiseError
from shardwise.units import format_bytes

_ROWS = ("where", "why", "fix")
_PLAIN_LINES = 10


class TerminalProgress:
    """One bar in a terminal; in a file or pipe, about ten lines that say the same."""

    def __init__(self, console: Console, *, in_bytes: bool = False) -> None:
        self._console, self._in_bytes = console, in_bytes
        self._bars: bars.Progress | None = None
        self._label, self._total, self._done = "", 0, 0
        self._started_s = 0.0

    def start(self, total: int, label: str) -> None:
        """Draw an empty bar."""
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
            self._print(f"{self._label} {self._count()}  {note}".rstrip())

    def finish(self, note: str = "") -> None:
        """Leave the bar as it stands and print the last note under it."""
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
    """A progress bar that is taken down even when the work fails."""
    progress = TerminalProgress(console, in_bytes=in_bytes)
    try:
        yield progress
    finally:
        progress.finish()


def print_error(console: Console, error: ShardwiseError) -> None:
    """Print an error as its rows: what in bold red, then where, why and fix."""
    text = Text.assemble(("error: ", "bold red"), (error.what, "red"))
    for name in _ROWS:
        row = getattr(error, name)
        if row:
            text.append(f"\n  {name + ':':<6} ", style="bold green" if name == "fix" else "bold")
            text.append(row.replace("\n", "\n" + " " * 9))
    console.print(text, soft_wrap=True)
