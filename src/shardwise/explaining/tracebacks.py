"""Tracebacks in a log: where each ends, in which exception, and how they follow from one another. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from shardwise.explaining.logs import Line

_HEADER = re.compile(r"Traceback \(most recent call last\):?(?:\s*\(RANK (?P<rank>\d+)\))?|\bray::[\w.]+\(.*\bpid=\d+")
_NAMED = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Interrupt|Exit|Failure|Timeout|Warning|Group|Iteration)"
    r"(?:\([\w.]+\))?(?::\s|:?$)"
)
_ANY_NAME = re.compile(r"^(?:[a-z_]\w*\.)*[A-Z]\w*[a-z]\w*(?:: |$)")
_BARE = re.compile(r"^(?:[A-Za-z_]\w*\.)*\w+(?:Error|Exception): \S")
_BETWEEN = re.compile(
    r"(?P<cause>The above exception was the direct cause)|(?P<context>During handling of the above exception)"
    r"|-- Process (?P<rank>\d+) terminated with the following error"
)
_NOT_FATAL = re.compile(
    r"^(?:Exception ignored in|Error in (?:atexit|sys\.excepthook))|\b(?:WARN(?:ING)?|INFO|DEBUG)\b"
)
_BOX = ("\N{BOX DRAWINGS LIGHT VERTICAL}", "\N{BOX DRAWINGS LIGHT ARC UP AND RIGHT}")  # rich draws a frame around
_NEXT = re.compile(
    r"^(?:Traceback|Original Traceback|During handling|The above exception|-- Process|[-+=]{5,}"
    r"|\[?[IWEF]\d{3,4} |\[?(?:ERROR|WARNING|INFO|DEBUG)\b|terminate called|Exception (?:raised from|ignored in)"
    r"|Error in |Child process with|Killed$|srun:|slurmstepd:|Process \w+-\d+:|shardwise:)"
)


@dataclass(slots=True)
class Raised:
    """The end of one traceback: the exception with its message, which may span lines."""

    line: Line
    rank: int | None
    time: str | None
    rows: list[str]
    """The message; the first row begins with the type."""
    numbers: set[int]
    """The lines of the message."""
    frames: str = ""
    link: str = ""
    """How it follows from the one before in its chain: `cause`, `context`, or `inner` (that one wraps it)."""
    fatal: bool = True
    tail: list[str] = field(default_factory=list)
    """What follows after an empty line, and may still be of the message."""


@dataclass(slots=True)
class Reading:
    """What one speaker's lines hold."""

    chains: list[list[Raised]] = field(default_factory=list)
    quoted: set[int] = field(default_factory=set)
    """Lines of frames and source, which say nothing themselves."""


@dataclass(slots=True)
class _Open:
    """A traceback whose end has not come."""

    header: Line
    indent: int
    rank: int | None
    link: str
    fatal: bool
    time: str | None
    frames: list[str] = field(default_factory=list)
    disturbed: bool = False


def read_tracebacks(lines: list[Line]) -> Reading:
    """Find the tracebacks in one speaker's lines.

    Args:
        lines: Of one rank or process; other output may stand between them.
    """
    reading = Reading()
    opened: _Open | None = None
    link, spawned = "", None
    for index, line in enumerate(lines):
        text = line.text.lstrip(" |+")
        if between := _BETWEEN.match(text):
            link = "cause" if between["cause"] else "context" if between["context"] else link
            spawned = int(between["rank"]) if between["rank"] else spawned
        if header := _HEADER.search(line.text):
            wrapped = _wrapped(line.text, header, reading, spawned)
            rank = int(header["rank"]) if header["rank"] else spawned
            opened = _open(lines, index, header, rank, link or ("inner" if wrapped else ""))
            link = ""
        elif opened and _is_frame(line, opened):
            reading.quoted.add(line.number)
            opened.frames.append(line.text)
        elif opened and _ends(text, opened):
            _close(reading, opened, lines, index)
            opened = None
        elif opened and text:
            opened.disturbed = True
        elif _is_member(line, text, reading):
            _close(reading, _Open(line, 0, None, "inner", True, line.time), lines, index)
    return reading


def _wrapped(text: str, header: re.Match[str], reading: Reading, spawned: int | None) -> bool:
    """True where the exception before only carries this one."""
    return bool(header["rank"] or "Original Traceback" in text or "ray::" in text or spawned is not None) or (
        text.lstrip().startswith("|") and bool(reading.chains)
    )


def _open(lines: list[Line], index: int, header: re.Match[str], rank: int | None, link: str) -> _Open:
    line = lines[index]
    before = [other for other in lines[max(0, index - 2) : index] if line.number - other.number <= 2]
    last = before[-1].text if before else ""
    fatal = not (_NOT_FATAL.search(last) or _NOT_FATAL.search(line.text[: header.start()]))
    indent = len(line.text) - len(line.text.lstrip(" |+"))
    time = line.time or (before[-1].time if before and before[-1].number == line.number - 1 else None)
    return _Open(line, indent, rank, link, fatal, time)


def _is_member(line: Line, text: str, reading: Reading) -> bool:
    """An exception of a group that was never raised by itself has no traceback of its own."""
    in_group = line.text.lstrip().startswith("|") and bool(reading.chains)
    return in_group and _NAMED.match(text) is not None and line.number not in reading.chains[-1][-1].numbers


def _is_frame(line: Line, opened: _Open) -> bool:
    text = line.text.lstrip(" |+")
    return len(line.text) - len(text) > opened.indent or text.startswith(_BOX)


def _ends(text: str, opened: _Open) -> bool:
    if _NAMED.match(text):
        return bool(opened.frames)
    return bool(opened.frames) and not opened.disturbed and _ANY_NAME.match(text) is not None


def _close(reading: Reading, opened: _Open, lines: list[Line], index: int) -> None:
    line = lines[index]
    message = _message(lines, index)
    raised = Raised(
        line,
        opened.rank if opened.rank is not None else line.rank,
        line.time or opened.time,
        [row.text.strip(" |") for row in message],
        {row.number for row in message},
        "\n".join(opened.frames),
        opened.link,
        opened.fatal,
        [row.text for row in _message(lines, index + len(message) + 1)]
        if _goes_on(lines, index + len(message))
        else [],
    )
    if opened.link and reading.chains:
        reading.chains[-1].append(raised)
    else:
        reading.chains.append([raised])


def _message(lines: list[Line], index: int) -> list[Line]:
    """The exception's first line and what follows until something else begins."""
    message = [lines[index]]
    for line in lines[index + 1 : index + 24]:
        text = line.text.strip(" |")
        if not text or _NEXT.match(text) or line.number - message[-1].number > 40:
            break
        message.append(line)
    return message


def _goes_on(lines: list[Line], index: int) -> bool:
    """True where one empty line stands and then something that begins nothing new."""
    if index + 1 >= len(lines) or lines[index].text.strip(" |"):
        return False
    text = lines[index + 1].text.strip(" |")
    return bool(text) and not _NEXT.match(text) and not _NAMED.match(text)


def bare_exceptions(lines: list[Line]) -> list[Line]:
    """Lines that read like the end of a traceback whose rest is not there."""
    return [line for line in lines if _BARE.match(line.text)]
