"""Logs of many ranks, interleaved: who said what, and when. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

# torchrun's `--tee` and torch's own excepthook, in the spellings of several versions, and Slurm's `srun --label`.
_RANK = re.compile(r"^\s*(?:\[(?:rank|default|Rank )\s?(?P<bracket>\d+)\](?::|\s)?|(?P<label>\d+): )\s?", re.IGNORECASE)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TIME = re.compile(
    r"(?P<day>\d{4}-\d{2}-\d{2})[ T](?P<clock>\d{2}:\d{2}:\d{2}(?:[.,]\d+)?)"
    r"|\b[IWEF](?P<short>\d{4} \d{2}:\d{2}:\d{2}\.\d+)"
)
_RAISED = re.compile(r"^(?:[\w.]+(?:Error|Exception|Interrupt|Exit|Warning|Failure|Timeout)|[\w.]*Error[\w.]*)(?::|$)")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log, without its prefix and colours."""

    number: int
    """From 1."""
    rank: int | None
    """Who wrote it, where the log says so."""
    text: str
    time: str | None
    """As written, so that it sorts; None where the line has none."""


@dataclass(frozen=True, slots=True)
class Raised:
    """The end of one traceback: the exception with its message, which may span lines."""

    first: Line
    text: str


def read_lines(log: str) -> list[Line]:
    """The lines of a log with the ranks that wrote them."""
    lines = []
    for number, raw in enumerate(log.splitlines(), start=1):
        text = _ESCAPES.sub("", raw).rstrip()
        prefix = _RANK.match(text)
        rank = int(prefix["bracket"] or prefix["label"]) if prefix else None
        if prefix:
            text = text[prefix.end() :]
        time = _TIME.search(text)
        stamp = (time["short"] or f"{time['day']} {time['clock']}".replace(",", ".")) if time else None
        lines.append(Line(number, rank, text, stamp))
    return lines


def by_rank(lines: list[Line]) -> dict[int | None, list[Line]]:
    """Each rank's own lines, in order; under None those that name nobody."""
    ranks: dict[int | None, list[Line]] = {}
    for line in lines:
        ranks.setdefault(line.rank, []).append(line)
    return ranks


def exceptions(lines: list[Line]) -> list[Raised]:
    """The ends of the tracebacks in one rank's lines: where an indented block is followed by `SomeError: ...`."""
    found = []
    in_traceback = False
    for index, line in enumerate(lines):
        if line.text.lstrip().startswith("Traceback (most recent call last)"):
            in_traceback = True
        elif in_traceback and _RAISED.match(line.text.lstrip(" |")):
            found.append(Raised(line, "\n".join(_message(lines[index:]))))
            in_traceback = False
    return found


def _message(lines: list[Line]) -> list[str]:
    """The exception's first line and what follows until something else begins."""
    message = [lines[0].text.strip(" |")]
    for line in lines[1:12]:
        text = line.text.strip()
        if not text or text.startswith(("Traceback", "During handling", "The above exception", "[", "W", "E", "I")):
            break
        message.append(text)
    return message
