"""The launcher's own account of who died first, and of what. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from shardwise.explaining.logs import LAUNCHER, Line

_FIELD = re.compile(r"^\s*(?P<name>time|host|rank|exitcode|error_file|traceback)\s*: ?(?P<value>.*)$")
_TIME = re.compile(r"^\d{4}-(\d\d-\d\d)_(\d\d:\d\d:\d\d)$")
_END = re.compile(r"^\s*(?:[-=]{20,}|\[\d+\]:)\s*$")
_AGENT = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)")


@dataclass(frozen=True, slots=True)
class Death:
    """A rank's end as the launcher saw it."""

    rank: int | None
    time: str
    code: int
    """Negative: the signal."""
    line: int


def read_summary(lines: list[Line]) -> tuple[list[Line], Death | None]:
    """The lines, those of a summary given to the ranks they speak of, and the first death.

    A rank that did not die first has only its traceback kept: the launcher itself kills those that linger.
    """
    blocks = _blocks(lines)
    deaths = [_death(lines[start:stop]) for start, stop in blocks]
    first = min((death for death in deaths if death), key=lambda death: death.time, default=None)
    lines = list(lines)
    for (start, stop), death in zip(blocks, deaths, strict=True):
        for index in range(start, stop):
            text = lines[index].text
            other = death is not first and _FIELD.match(text) and "Traceback (most" not in text
            rank, time = (death.rank, death.time) if death else (None, None)
            lines[index] = replace(lines[index], rank=rank, time=time, text="" if other else text, process=LAUNCHER)
    return lines, first or _seen_by_agent(lines)


def _blocks(lines: list[Line]) -> list[tuple[int, int]]:
    found = []
    for index, line in enumerate(lines):
        field = _FIELD.match(line.text)
        if field and field["name"] == "time" and _TIME.match(field["value"]):
            stop = next((i for i in range(index, len(lines)) if _END.match(lines[i].text)), len(lines))
            found.append((index, stop))
    return found


def _death(block: list[Line]) -> Death | None:
    fields = {field["name"]: field["value"] for line in block if (field := _FIELD.match(line.text))}
    time = _TIME.match(fields["time"])
    rank = re.match(r"\d+", fields.get("rank", ""))
    code = re.match(r"-?\d+", fields.get("exitcode", ""))
    if not (time and rank and code):
        return None
    line = next(line.number for line in block if "exitcode" in line.text)
    return Death(int(rank[0]), f"{time[1]} {time[2]}.", int(code[0]), line)


def _seen_by_agent(lines: list[Line]) -> Death | None:
    for line in lines:
        if "exitcode" in line.text and (seen := _AGENT.search(line.text)):
            return Death(int(seen["rank"]), line.time or "", int(seen["code"]), line.number)
    return None
