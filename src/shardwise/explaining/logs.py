"""Logs of several ranks: prefixes stripped, ranks told apart, tracebacks found."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

_CLOCK = r"(?P<clock>\d{2}:\d{2}:\d{2}(?:[.,]\d+)?)"
_STAMP = re.compile(
    # Kubernetes and docker (with the stream and its F or P mark), loggers, Slurm; in brackets or not.
    rf"\s*\[?\d{{4}}[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T _]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?\]?"
    r"(?:\s+std(?:out|err) [FP])?\s?"
)
_AMERICAN = re.compile(rf"\s*\[?(?P<month>\d\d)/(?P<day>\d\d)/\d{{4}} {_CLOCK}\]?\s?")
_GLOG = re.compile(rf"^\s*\[?[IWEF](?P<month>\d{{1,2}})(?P<day>\d\d) {_CLOCK}")
_RANK = re.compile(
    r"\s*(?:"
    r"\[(?:rank|default|trainer|worker)[ =:]*(?P<bracket>\d+)\]:?"  # torch's excepthook, torchrun's tee, Lightning
    r"|\[(?P<old>\d+)\]:(?=\s?\S)"  # torchrun's tee before it named the role
    r"|\[\d+,(?P<mpi>\d+)\]<std(?:out|err)>:"
    r"|\(?(?:global[ _])?rank[ =]?(?P<plain>\d+)\)?\s*[:|]"
    r")(?: ?\| ?|\s?)",
    re.IGNORECASE,
)
_LABEL = re.compile(r"\s*(?P<label>\d{1,5}): ?")  # srun --label
_PROCESS = re.compile(
    r"\s*(?:"
    r"\((?P<actor>[\w.:<>-]+(?:\([^()]*\))? (?:rank=\d+, )?pid=\d+(?:, ip=[\w.:]+)?)\)"  # Ray
    r"|\[(?P<pod>pod/[^\]]+)\]"  # kubectl logs --prefix
    r"|(?P<service>[\w.-]*[a-z][\w.-]*[-_]\d+)\s+\|"  # docker compose
    r"|(?P<host>(?:worker|node|host|gpu)[\w.-]*):(?=\s)"  # pdsh
    r") ?"
)
_OPENS = frozenset("[(0123456789")


@dataclass(frozen=True, slots=True)
class Prefix:
    """What stood before a line, and the line itself."""

    rank: int | None
    process: str
    """As written; "" where nothing names one."""
    time: str | None
    """Month, day and clock, so that every style of stamp sorts with every other."""
    text: str


def has_labels(lines: list[str]) -> bool:
    """True where most lines begin with `3: `: then it is srun's label and not part of what was said."""
    said = [line for line in lines[:2000] if line.strip()]
    labelled = sum(_LABEL.match(_after_stamp(line)) is not None for line in said)
    return labelled > len(said) / 2


def split_prefix(text: str, *, labels: bool) -> Prefix:
    """Take off everything that is not the program's own, in whatever order it stands."""
    rank, process, time = None, "", None
    while _may_be_prefixed(text):
        if stamp := _STAMP.match(text) or _AMERICAN.match(text):
            time = time or _sortable(stamp)  # the outermost: one collector's clock for all
            text = text[stamp.end() :]
        elif named := _RANK.match(text):
            rank = int(next(filter(None, named.groups())))  # the innermost: the global rank
            text = text[named.end() :]
        elif labels and rank is None and (label := _LABEL.match(text)):
            rank = int(label["label"])
            text = text[label.end() :]
        elif speaker := _PROCESS.match(text):
            process = process or next(filter(None, speaker.groups()))
            text = text[speaker.end() :]
        else:
            break
    if time is None and (glog := _GLOG.match(text)):
        time = _sortable(glog)
    return Prefix(rank, process, time, text)


def _may_be_prefixed(text: str) -> bool:
    """A cheap look, for logs of many lines: every prefix begins with one of these or soon has one of those."""
    head = text[:48].lstrip()
    return head[:1] in _OPENS or ": " in head or "|" in head or head[-1:] == ":"


def _after_stamp(text: str) -> str:
    stamp = _STAMP.match(text)
    return text[stamp.end() :] if stamp else text


def _sortable(stamp: re.Match[str]) -> str:
    clock, _, fraction = stamp["clock"].replace(",", ".").partition(".")
    return f"{stamp['month']:0>2}-{stamp['day']} {clock}.{fraction:0<9.9}"


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
class Tracebacks:
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


def read_tracebacks(lines: list[Line]) -> Tracebacks:
    """Find the tracebacks in one speaker's lines.

    Args:
        lines: Of one rank or process; other output may stand between them.
    """
    reading = Tracebacks()
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


def _wrapped(text: str, header: re.Match[str], reading: Tracebacks, spawned: int | None) -> bool:
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


def _is_member(line: Line, text: str, reading: Tracebacks) -> bool:
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


def _close(reading: Tracebacks, opened: _Open, lines: list[Line], index: int) -> None:
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
