"""Logs of several ranks: strip prefixes, assign lines to ranks, find tracebacks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

_CLOCK = r"(?P<clock>\d{2}:\d{2}:\d{2}(?:[.,]\d+)?)"
_STAMP = re.compile(
    # Kubernetes and docker (with stream and F or P flag), loggers, Slurm; optionally in brackets.
    rf"\s*\[?\d{{4}}[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T _]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?\]?"
    r"(?:\s+std(?:out|err) [FP])?\s?"
)
_AMERICAN = re.compile(rf"\s*\[?(?P<month>\d\d)/(?P<day>\d\d)/\d{{4}} {_CLOCK}\]?\s?")
_GLOG = re.compile(rf"^\s*\[?[IWEF](?P<month>\d{{1,2}})(?P<day>\d\d) {_CLOCK}")
_RANK = re.compile(
    r"\s*(?:"
    r"\[(?:rank|default|trainer|worker)[ =:]*(?P<bracket>\d+)\]:?"  # torch's excepthook, torchrun's tee, Lightning
    r"|\[(?P<old>\d+)\]:(?=\s?\S)"  # torchrun's tee in older versions, without the role
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
_LABELED = re.compile(f"(?:{_STAMP.pattern})?{_LABEL.pattern}")
_OPENS = frozenset("[(0123456789")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_GLUED = re.compile(r"((?:it/s|s/it|\w/s)[^\]]{0,80}\])(?=\[rank|\[default|Traceback)")  # bars end without a newline
_RAY_WORKER = re.compile(r"pid=(?P<pid>\d+)\)[ :]*(?:world_)?rank=(?P<rank>\d+)")
_RAY_SETUP = re.compile(r"\[rank=(?P<rank>\d+), world_size=\d+\]")
_PID = re.compile(r"pid=(\d+)")
_PROGRESS = re.compile(r"\b(?:step|epoch|iter|iteration|loss)\b.*\d|\d(?:it/s|s/it)\b", re.IGNORECASE)
LAUNCHER = "the launcher"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log, without its prefix and colors."""

    number: int
    """From 1."""
    rank: int | None
    """The rank that wrote the line, if the log says."""
    text: str
    time: str | None
    """Month, day and time in one sortable format for all styles; None if the line has no timestamp."""
    process: str = ""
    """The log collector's name of the process, if any."""

    @property
    def speaker(self) -> tuple[str, int | None]:
        """Key of lines from the same source. The launcher's lines about a rank are separate from the rank's own."""
        named = self.rank is None or self.process == LAUNCHER
        return (self.process if named else ""), self.rank


def read_lines(log: str) -> list[Line]:
    """Parse the lines of a log, with the ranks that wrote them."""
    rows = list(_rows(log))
    texts = [text for _, text in rows[:2000] if text.strip()]
    # If most lines begin with a number and a colon, as in `3: `, it is srun's label.
    has_labels = sum(_LABELED.match(text) is not None for text in texts) > len(texts) / 2
    return _with_ranks_of_processes([_split_prefix(number, text, has_labels) for number, text in rows])


def _rows(log: str) -> Iterator[tuple[int, str]]:
    """Yield rows with line numbers as in an editor; overwritten states of a progress bar share one number."""
    for number, raw in enumerate(log.split("\n"), start=1):
        text = _ESCAPES.sub("", raw) if "\x1b" in raw else raw
        text = text.removeprefix("> ")  # quoted in an issue tracker
        if "/s" in text or "s/it" in text:
            text = _GLUED.sub(r"\1\r", text)
        for part in text.rstrip("\r").split("\r"):
            yield number, part.rstrip()


def _split_prefix(number: int, text: str, has_labels: bool) -> Line:
    """Strip timestamps, ranks and process names that were added to the program's line, in any order."""
    rank, process, time = None, "", None
    # A fast check for long logs: every prefix begins with one of these characters or soon contains one of those.
    while (head := text[:48].lstrip()) and (head[0] in _OPENS or ": " in head or "|" in head or head[-1] == ":"):
        if found := _STAMP.match(text) or _AMERICAN.match(text):
            time = time or _sortable(found)  # the outermost: the collector's clock, common to all lines
        elif found := _RANK.match(text):
            rank = int(next(filter(None, found.groups())))  # the innermost: the global rank
        elif has_labels and rank is None and (found := _LABEL.match(text)):
            rank = int(found["label"])
        elif found := _PROCESS.match(text):
            process = process or next(filter(None, found.groups()))
        else:
            break
        text = text[found.end() :]
    if time is None and (glog := _GLOG.match(text)):
        time = _sortable(glog)
    return Line(number, rank, text, time, process)


def _sortable(stamp: re.Match[str]) -> str:
    clock, _, fraction = stamp["clock"].replace(",", ".").partition(".")
    return f"{stamp['month']:0>2}-{stamp['day']} {clock}.{fraction:0<9.9}"


def _with_ranks_of_processes(lines: list[Line]) -> list[Line]:
    """Assign the rank that a process mentions in one line to all its lines."""
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


def by_speaker(lines: list[Line]) -> list[list[Line]]:
    """Group lines by speaker, in order; lines without rank and process form one group."""
    speakers: dict[tuple[str, int | None], list[Line]] = {}
    for line in lines:
        speakers.setdefault(line.speaker, []).append(line)
    return list(speakers.values())


def last_progress(own: list[Line]) -> int:
    """Return a line up to which the rank certainly ran: its third last report of a step."""
    reports = [line for line in own if _PROGRESS.search(line.text) and not line.text.startswith(("wandb:", " "))]
    return [0, 0, 0, *dict.fromkeys(line.number for line in reports)][-3]


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
_BOX = ("\N{BOX DRAWINGS LIGHT VERTICAL}", "\N{BOX DRAWINGS LIGHT ARC UP AND RIGHT}")  # frame of rich tracebacks
_NEXT = re.compile(
    r"^(?:Traceback|Original Traceback|During handling|The above exception|-- Process|[-+=]{5,}"
    r"|\[?[IWEF]\d{3,4} |\[?(?:ERROR|WARNING|INFO|DEBUG)\b|terminate called|Exception (?:raised from|ignored in)"
    r"|Error in |Child process with|Killed$|srun:|slurmstepd:|Process \w+-\d+:|shardwise:)"
)


@dataclass(slots=True)
class Raised:
    """One traceback, and the exception at its end with its message, which may span lines."""

    line: Line
    """Line of the exception; until it is found, the first line of the traceback."""
    rank: int | None = None
    time: str | None = None
    link: str = ""
    """Relation to the preceding exception of the chain: `cause`, `context`, or `inner` (wrapped by it)."""
    fatal: bool = True
    indent: int = 0
    frames: list[str] = field(default_factory=list)
    is_disturbed: bool = False
    """Whether there is other output between the frames and the exception."""
    rows: list[str] = field(default_factory=list)
    """Rows of the message; the first begins with the type."""
    numbers: set[int] = field(default_factory=set)
    """Line numbers of the message."""
    tail: list[str] = field(default_factory=list)
    """Rows after an empty line, which may belong to the message."""


def read_tracebacks(lines: list[Line]) -> tuple[list[list[Raised]], set[int]]:
    """Return the chains of exceptions in one speaker's lines, and the line numbers of frames and source code."""
    chains: list[list[Raised]] = []
    quoted: set[int] = set()
    opened: Raised | None = None
    link, spawned = "", None
    for index, line in enumerate(lines):
        text = line.text.lstrip(" |+")
        in_group = bool(chains) and line.text.lstrip().startswith("|")
        if between := _BETWEEN.match(text):
            link = "cause" if between["cause"] else "context" if between["context"] else link
            spawned = int(between["rank"]) if between["rank"] else spawned
        if header := _HEADER.search(line.text):
            rank = int(header["rank"]) if header["rank"] else spawned
            is_carried = rank is not None or "Original Traceback" in line.text or "ray::" in line.text or in_group
            opened = _open(lines, index, header, rank, link or ("inner" if is_carried else ""))
            link = ""
        elif opened and (len(line.text) - len(text) > opened.indent or text.startswith(_BOX)):
            quoted.add(line.number)
            opened.frames.append(line.text)
        elif opened and opened.frames and (_NAMED.match(text) or (not opened.is_disturbed and _ANY_NAME.match(text))):
            _close(chains, opened, lines, index)
            opened = None
        elif opened and text:
            opened.is_disturbed = True
        elif in_group and _NAMED.match(text) and line.number not in chains[-1][-1].numbers:
            # A member of an exception group that was not raised has no traceback.
            _close(chains, Raised(line, link="inner"), lines, index)
    return chains, quoted


def _open(lines: list[Line], index: int, header: re.Match[str], rank: int | None, link: str) -> Raised:
    line = lines[index]
    before = next(
        (other for other in reversed(lines[max(0, index - 2) : index]) if line.number - other.number <= 2), None
    )
    fatal = not _NOT_FATAL.search(line.text[: header.start()]) and not (before and _NOT_FATAL.search(before.text))
    time = line.time or (before.time if before and before.number == line.number - 1 else None)
    return Raised(line, rank, time, link, fatal, indent=len(line.text) - len(line.text.lstrip(" |+")))


def _close(chains: list[list[Raised]], raised: Raised, lines: list[Line], index: int) -> None:
    line = raised.line = lines[index]
    message = _message(lines, index)
    raised.rank = raised.rank if raised.rank is not None else line.rank
    raised.time = line.time or raised.time
    raised.rows = [row.text.strip(" |") for row in message]
    raised.numbers = {row.number for row in message}
    # One empty line, and then a row that begins nothing new.
    after = [row.text.strip(" |") for row in lines[index + len(message) : index + len(message) + 2]]
    if len(after) == 2 and not after[0] and after[1] and not _NEXT.match(after[1]) and not _NAMED.match(after[1]):
        raised.tail = [row.text for row in _message(lines, index + len(message) + 1)]
    if raised.link and chains:
        chains[-1].append(raised)
    else:
        chains.append([raised])


def _message(lines: list[Line], index: int) -> list[Line]:
    """Return the exception's first line and the following rows of its message."""
    message = [lines[index]]
    for line in lines[index + 1 : index + 24]:
        text = line.text.strip(" |")
        if not text or _NEXT.match(text) or line.number - message[-1].number > 40:
            break
        message.append(line)
    return message


def bare_exceptions(lines: list[Line]) -> list[Line]:
    """Return lines that look like the end of a traceback without the rest."""
    return [line for line in lines if _BARE.match(line.text)]
