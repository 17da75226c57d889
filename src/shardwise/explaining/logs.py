"""Logs of many ranks, interleaved: who said what, and when. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.explaining.prefixes import has_labels, split_prefix

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_GLUED = re.compile(r"((?:it/s|s/it|\w/s)[^\]]{0,80}\])(?=\[rank|\[default|Traceback)")  # a bar ends without a line end
_RAY_WORKER = re.compile(r"pid=(?P<pid>\d+)\)[ :]*(?:world_)?rank=(?P<rank>\d+)")
_RAY_SETUP = re.compile(r"\[rank=(?P<rank>\d+), world_size=\d+\]")
_PID = re.compile(r"pid=(\d+)")
_PROGRESS = re.compile(r"\b(?:step|epoch|iter|iteration|loss)\b.*\d|\d(?:it/s|s/it)\b", re.IGNORECASE)
LAUNCHER = "the launcher"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log, without its prefix and colours."""

    number: int
    """From 1."""
    rank: int | None
    """Who wrote it, where the log says so."""
    text: str
    time: str | None
    """So that it sorts; None where the line has none."""
    process: str = ""
    """The process as the collector names it, where it does."""

    @property
    def speaker(self) -> tuple[str, int | None]:
        """Whose lines belong together. What the launcher says of a rank is no part of what the rank said."""
        named = self.rank is None or self.process == LAUNCHER
        return (self.process if named else ""), self.rank


def read_lines(log: str) -> list[Line]:
    """The lines of a log with the ranks that wrote them."""
    rows = list(_rows(log))
    labels = has_labels([text for _, text in rows[:2000]])
    lines = []
    for number, text in rows:
        prefix = split_prefix(text, labels=labels)
        lines.append(Line(number, prefix.rank, prefix.text, prefix.time, prefix.process))
    return _with_ranks_of_processes(lines)


def _rows(log: str) -> Iterator[tuple[int, str]]:
    """Numbered as an editor does; what a progress bar wrote over itself counts as rows of one number."""
    for number, raw in enumerate(log.split("\n"), start=1):
        text = _ESCAPES.sub("", raw) if "\x1b" in raw else raw
        text = text.removeprefix("> ")  # quoted in an issue
        if "/s" in text or "s/it" in text:
            text = _GLUED.sub(r"\1\r", text)
        for part in text.rstrip("\r").split("\r"):
            yield number, part.rstrip()


def _with_ranks_of_processes(lines: list[Line]) -> list[Line]:
    """A process that says its rank once has it in all its lines."""
    ranks: dict[str, set[int]] = {}
    for line in lines:
        if "rank=" in line.text:
            for worker in _RAY_WORKER.finditer(line.text):
                ranks.setdefault(worker["pid"], set()).add(int(worker["rank"]))
        if line.process:
            setup = _RAY_SETUP.search(line.text)
            rank = line.rank if line.rank is not None else int(setup["rank"]) if setup else None
            if rank is not None:
                ranks.setdefault(_process_key(line.process), set()).add(rank)
    if not ranks:
        return lines
    known = {process: next(iter(own)) for process, own in ranks.items() if len(own) == 1}
    return [
        replace(line, rank=known.get(_process_key(line.process))) if line.process and line.rank is None else line
        for line in lines
    ]


def _process_key(process: str) -> str:
    pid = _PID.search(process)
    return pid[1] if pid else process


def by_speaker(lines: list[Line]) -> dict[tuple[str, int | None], list[Line]]:
    """Each speaker's own lines, in order; those that name nobody are one speaker."""
    speakers: dict[tuple[str, int | None], list[Line]] = {}
    for line in lines:
        speakers.setdefault(line.speaker, []).append(line)
    return speakers


def last_progress(lines: list[Line]) -> dict[tuple[str, int | None], int]:
    """Up to which line each speaker certainly lived: its third last report of a step."""
    reports: dict[tuple[str, int | None], list[int]] = {}
    for line in lines:
        if _PROGRESS.search(line.text) and not line.text.startswith(("wandb:", " ")):
            numbers = reports.setdefault(line.speaker, [])
            if line.number not in numbers[-1:]:
                numbers.append(line.number)
    return {speaker: numbers[-3] for speaker, numbers in reports.items() if len(numbers) >= 3}
