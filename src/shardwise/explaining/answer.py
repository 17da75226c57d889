"""explain(): find the known failure (a page of docs/errors) of an error or log, with its cause and fix. No torch."""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import yaml

from shardwise.explaining import logs
from shardwise.explaining.logs import Line, Raised, bare_exceptions, last_progress, read_lines, read_tracebacks
from shardwise.pages import read_pages

_PAGE = re.compile(r"\A---\n(?P<head>.*?)^---\n# [^\n]*\n\n(?P<body>.*)\Z", re.DOTALL | re.MULTILINE)
_SECTION = re.compile(r"^## (?P<title>[^\n]+)\n\n(?P<text>.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_INNER_RANK = re.compile(r"\[(?:[^\]]*\s)?Rank[ :]+(\d+)\]|-- [Pp]rocess (\d+)|\btask (\d+):", re.IGNORECASE)
_LAUNCHER_SAYS = "SW558"
_ABORTED_AT_EXIT = "SW587"
_OWN = re.compile(r"^(?:shardwise\.errors\.\w+|error): .+(?:\n *(?:where|why|fix): .+(?:\n {9}.+)*)+", re.MULTILINE)
_OWN_FIELD = re.compile(r"^ *(where|why|fix): +(.+(?:\n(?! *(?:where|why|fix):).+)*)", re.MULTILINE)
_VARYING = re.compile(r"[0-9a-f]{4,}|\d{3,}|\d+\.\d+")
_UNKNOWN = """\
This error is not known{place}:
  {message}
It is the first failure in the text that is no echo of another, and nothing in the catalogue
matches it. To have it added, report the text with the versions that `shardwise --version` and
`python -m torch.utils.collect_env` print."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A known failure: a page in docs/errors, whose header has the patterns."""

    code: str
    """`SW5nn`; never reused for something else."""
    name: str
    """Name in words, with hyphens."""
    kind: Literal["cause", "echo", "warning"]
    """An echo is a consequence of another rank's failure, on other ranks or in the launcher."""
    torch: str
    """Affected versions."""
    patterns: tuple[re.Pattern[str], ...]
    what: str
    why: str
    fix: str
    with_shardwise: str = ""
    sources: tuple[str, ...] = ()
    alias: str = ""
    """Its name before it had a code."""
    frames: re.Pattern[str] | None = None
    """Frames that the traceback must contain, if other programs raise the same message."""

    def find(self, text: str) -> re.Match[str] | None:
        """Return the earliest match of the failure's patterns in `text`."""
        matches = [match for pattern in self.patterns if (match := pattern.search(text))]
        return min(matches, key=lambda match: match.start(), default=None)


@functools.cache
def catalogue() -> dict[str, Failure]:
    """Every known failure by its code."""
    failures = [_read(text, name) for name, text in read_pages("docs/errors").items()]
    return {failure.code: failure for failure in failures}


def _read(text: str, name: str) -> Failure:
    page = _PAGE.match(text)
    assert page is not None, f"{name} has no head"
    head = yaml.safe_load(page["head"])
    sections = {match["title"]: match["text"].strip() for match in _SECTION.finditer(page["body"])}
    return Failure(
        **{name: head[name] for name in ("code", "name", "kind", "torch")},
        patterns=tuple(re.compile(pattern, re.MULTILINE) for pattern in head["patterns"]),
        what=page["body"].partition("## ")[0].strip(),
        why=sections["Why"],
        fix=sections["Fix"],
        with_shardwise=sections.get("With shardwise", ""),
        sources=tuple(head.get("sources", ())),
        alias=head.get("alias", ""),
        frames=re.compile(head["frames"]) if "frames" in head else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Explanation of a failure, as far as known."""

    failure: Failure | None
    """None if the text matches no known failure."""
    message: str
    """The recognized text; the first error of an unknown failure."""
    rank: int | None = None
    """The rank that failed first, if the log says."""
    line: int | None = None
    """Line of the message in the text."""
    echoes: tuple[str, ...] = ()
    """Codes of consequences on other ranks."""

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, for JSON; `code` is None if the failure is unknown.

        Ranks:
            Local.
        """
        place = {"message": self.message, "rank": self.rank, "line": self.line, "echoes": list(self.echoes)}
        if self.failure is None:
            return {"code": None, **place, **_own_fields(self.message)}
        names = ("name", "what", "why", "fix", "torch")
        known = {name: getattr(self.failure, name) for name in names}
        return {"code": self.failure.code, **place, **known, "sources": list(self.failure.sources)}

    def __str__(self) -> str:
        parts = [f"rank {self.rank}"] if self.rank is not None else []
        parts += [f"line {self.line}"] if self.line and (self.failure is not None or parts) else []
        place = f" ({', '.join(parts)})" if parts else ""
        failure = self.failure
        if failure is not None:
            rows = [
                f"{failure.code} {failure.name}{place}",
                failure.what,
                f"  message: {self.message}",
                f"  why:     {_flat(failure.why)}",
                f"  fix:     {_flat(failure.fix)}",
                f"  torch:   {failure.torch}",
            ]
            rows += [f"  with shardwise: {_flat(failure.with_shardwise)}"] if failure.with_shardwise else []
            rows += [f"  also seen, as a consequence: {', '.join(self.echoes)}"] if self.echoes else []
            return "\n".join([*rows, *(f"  see:     {source}" for source in failure.sources)])
        if not self.message:
            return "No error was found in this text: no traceback, and no message that is known."
        if _own_fields(self.message):
            return f"This is an error of shardwise's own{place}; it names its cause and its fix:\n  {self.message}"
        return _UNKNOWN.format(place=place, message=self.message)


def _own_fields(message: str) -> dict[str, str]:
    """Parse the fields `what`, `where`, `why` and `fix` of a shardwise error; empty for other errors."""
    if not _OWN.match(message):
        return {}
    what = message.partition("\n")[0].partition(": ")[2]
    return {"what": what, **{name: _flat(text) for name, text in _OWN_FIELD.findall(message)}}


def _flat(text: str) -> str:
    return " ".join(text.split())


def explain(problem: BaseException | str) -> Explanation:
    """Explain an error: cause, fix, and affected torch versions.

    Args:
        problem: An exception, or a text: a message, a traceback, a whole log with the lines of many ranks, or the code
            of a known failure.

    Returns:
        The explanation. If a log has several failures, it is about the first one that is no consequence of another,
        such as timeouts of waiting ranks or the launcher's summary. Its `failure` is None if the failure is unknown.

    Ranks:
        Local.
    """
    if isinstance(problem, BaseException):
        # The whole traceback: the decisive message may be that of a cause, or nested in another text.
        problem = "".join(traceback.format_exception(problem))
    text = problem.strip()
    for failure in catalogue().values():
        if failure.code == text.upper() or text in {failure.alias, failure.name} - {""}:
            return Explanation(failure=failure, message=failure.patterns[0].pattern)
    lines, death = _read_summary(read_lines(problem))
    speakers = [(own, last_progress(own)) for own in logs.by_speaker(lines)]
    events = [
        event for own, alive in speakers for event in _events(own) if event.line >= alive
    ]  # the rank continued after earlier ones
    own = _OWN.search(problem)  # printed without a traceback by our command
    if not events:
        return Explanation(failure=None, message=own[0] if own else "")
    first = _first(events, death)
    is_own = own and first.failure is None and own[0].partition("\n")[0] == first.message
    echoes = {event.failure.code for event in events if event.failure and event.failure.kind == "echo"}
    return Explanation(
        failure=first.failure,
        message=own[0] if own and is_own else first.message,
        rank=_rank(first, events, death),
        line=first.line,
        echoes=tuple(sorted(echoes - {first.failure and first.failure.code})),
    )


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """One failure at a place in the log."""

    failure: Failure | None
    message: str
    rank: int | None
    line: int
    time: str | None
    raised: bool = False
    """Whether it has a traceback."""

    @property
    def weight(self) -> int:
        """0: causes, known or not; 1: likely errors; 2: echoes; 3: the launcher's report; 4: warnings."""
        if self.failure is None:
            return 0 if self.raised else 1
        if self.failure.code == _LAUNCHER_SAYS:
            return 3
        if self.failure.code == _ABORTED_AT_EXIT:
            return 1  # may follow from another failure, which has precedence
        return {"cause": 0, "echo": 2, "warning": 4}[self.failure.kind]


class _Hit(NamedTuple):
    """A known failure, and its message as in the text."""

    failure: Failure
    message: str


def _events(own: list[Line]) -> Iterator[FailureEvent]:
    """Return every failure in one rank's lines."""
    chains, quoted = read_tracebacks(own)
    hits = _hits([line for line in own if line.number not in quoted])
    used = set(quoted)
    for chain in chains:
        used.update(*(raised.numbers for raised in chain))
        event = _event_of_chain([raised for raised in chain if raised.fatal], hits, own[0].rank)
        if event is not None:
            yield event
    for line in own:
        if line.text in hits and line.number not in used:
            yield _event(hits[line.text], line, line.rank, line.time)
    for line in bare_exceptions(own):
        if line.number not in used and line.text not in hits:
            yield FailureEvent(None, line.text, line.rank, line.number, line.time)


def _event(hit: _Hit, line: Line, rank: int | None, time: str | None, *, raised: bool = False) -> FailureEvent:
    if rank is None and (named := _INNER_RANK.search(line.text)):
        rank = int(next(filter(None, named.groups())))
    return FailureEvent(hit.failure, hit.message, rank, line.number, time, raised)


def _event_of_chain(chain: list[Raised], hits: dict[str, _Hit], speaker: int | None) -> FailureEvent | None:
    """Return the most informative exception of a chain: a known cause, else its root."""
    inner = [raised for raised in chain if raised.link == "inner"]
    if any(raised.rank == speaker for raised in inner):  # every rank prints all ranks' failures: keep its own
        chain = [raised for raised in chain if raised.link != "inner" or raised.rank == speaker]
    known = [(raised, hit) for raised in chain if (hit := _known(raised, hits))]
    echoes = [raised for raised, _ in known]
    unknown = [
        raised
        for raised, after in zip(chain, [*chain[1:], None], strict=False)
        if raised not in echoes and (raised.link == "inner" or after is None or after.link != "inner")
    ]
    known.sort(key=lambda one: one[1].failure.kind != "cause")
    if known and (known[0][1].failure.kind == "cause" or not unknown):
        raised, hit = known[0]
        return _event(hit, raised.line, raised.rank, raised.time, raised=True)
    if not unknown:
        return None
    root = unknown[-1]
    for raised in reversed(unknown[:-1]):  # the first of a chain of causes
        root = raised if root.link == "cause" else root
    if inner:
        root = next((raised for raised in unknown if raised.link == "inner"), unknown[0])
    text = "\n".join(root.rows)
    text = text if _OWN.match(text) else "\n".join(root.rows[:8])
    return FailureEvent(None, text, root.rank, root.line.number, root.time, raised=True)


def _known(raised: Raised, hits: dict[str, _Hit]) -> _Hit | None:
    frames = "\n".join(raised.frames)
    for failure in catalogue().values():  # pages with frames are the most specific
        if failure.frames and failure.frames.search(frames) and (match := failure.find(raised.rows[0])):
            return _Hit(failure, match[0])
    found = [hits[row] for row in (raised.line.text, *raised.rows) if row in hits]
    if not found and len(raised.rows) > 1:  # a terminal or log collector may have wrapped the message
        found = [hit for text in (" ".join(raised.rows), "".join(raised.rows)) if (hit := _best(text))]
    found += [hits[row] for row in raised.tail if row in hits and hits[row].failure.kind == "cause"]
    return min(found, key=lambda hit: hit.failure.kind != "cause", default=None)


def _hits(lines: list[Line]) -> dict[str, _Hit]:
    """Return the known message of each text; lines that differ only in numbers are first matched once."""
    shapes: dict[str, list[str]] = {}
    for text in dict.fromkeys(line.text for line in lines if line.text):
        shapes.setdefault(_VARYING.sub("0", text), []).append(text)
    everything = "\n".join(texts[0] for texts in shapes.values())
    present = [failure for failure in catalogue().values() if not failure.frames and failure.find(everything)]
    hits: dict[str, _Hit] = {}
    for texts in shapes.values() if present else ():
        if _best(texts[0], present):
            hits.update((text, hit) for text in texts if (hit := _best(text, present)))
    for text, hit in list(hits.items()):  # also without the frame around a traceback
        hits.setdefault(text.strip(" |"), hit)
    return hits


def _best(text: str, among: list[Failure] | None = None) -> _Hit | None:
    """Return the most specific message in `text`: causes first, then the longest, then the highest code."""
    candidates = catalogue().values() if among is None else among
    found = [_Hit(failure, match[0]) for failure in candidates if not failure.frames and (match := failure.find(text))]
    return max(found, key=lambda hit: (hit.failure.kind == "cause", len(hit.message), hit.failure.code), default=None)


_FIELD = re.compile(r"^\s*(?P<name>time|host|rank|exitcode|error_file|traceback)\s*: ?(?P<value>.*)$")
_TIME = re.compile(r"^\s*time\s*: ?\d{4}-(\d\d-\d\d)_(\d\d:\d\d:\d\d)$")
_END = re.compile(r"^\s*(?:[-=]{20,}|\[\d+\]:)\s*$")
_AGENT = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)")


class _Death(NamedTuple):
    """End of a rank as reported by the launcher; a negative code is a signal."""

    rank: int
    time: str
    code: int


def _read_summary(lines: list[Line]) -> tuple[list[Line], _Death | None]:
    """Assign the lines of the launcher's summary to their ranks; return the lines and the first death.

    Only the traceback is kept of ranks that did not die first, because the launcher kills the remaining ranks.
    """
    starts = [index for index, line in enumerate(lines) if _TIME.match(line.text)]
    stops = [next((i for i in range(start, len(lines)) if _END.match(lines[i].text)), len(lines)) for start in starts]
    deaths = [_death(lines[start:stop]) for start, stop in zip(starts, stops, strict=True)]
    # Times are in seconds: within a second, a rank that the launcher ended (SIGTERM) was not the first.
    first = min((death for death in deaths if death), key=lambda death: (death.time, death.code == -15), default=None)
    lines = list(lines)
    for start, stop, death in zip(starts, stops, deaths, strict=True):
        for index in range(start, stop):
            text = lines[index].text
            is_dropped = death is not first and _FIELD.match(text) and "Traceback (most" not in text
            rank, time = (death.rank, death.time) if death else (None, None)
            lines[index] = replace(
                lines[index], rank=rank, time=time, text="" if is_dropped else text, process=logs.LAUNCHER
            )
    if first is None:
        seen = ((line, _AGENT.search(line.text)) for line in lines if "exitcode" in line.text)
        first = next((_Death(int(end["rank"]), line.time or "", int(end["code"])) for line, end in seen if end), None)
    return lines, first


def _death(block: list[Line]) -> _Death | None:
    fields = {field["name"]: field["value"] for line in block if (field := _FIELD.match(line.text))}
    time = _TIME.match(block[0].text)
    rank, code = (re.match(r"-?\d+", fields.get(name, "")) for name in ("rank", "exitcode"))
    return _Death(int(rank[0]), f"{time[1]} {time[2]}.", int(code[0])) if time and rank and code else None


def _first(events: list[FailureEvent], death: _Death | None) -> FailureEvent:
    """Return the first failure: causes before echoes, then by time if all have one, by first death, by line."""
    weight = min(event.weight for event in events)
    # A rank may print a failure several times, with and without a time: use the first.
    earliest: dict[tuple[object, ...], FailureEvent] = {}
    for event in sorted(events, key=lambda event: event.line):
        if event.weight == weight:
            earliest.setdefault((event.rank, event.failure.code if event.failure else event.message), event)
    rivals = list(earliest.values())
    if weight > 0:  # an echo without a rank repeats that of a rank
        rivals = [event for event in rivals if event.rank is not None] or rivals
    if all(event.time for event in rivals):
        return min(rivals, key=lambda event: (event.time or "", event.line))
    # The rank that died first failed first only among ranks with the same kind of failure.
    return min(rivals, key=lambda event: (death is None or event.rank != death.rank, event.line))


def _rank(first: FailureEvent, events: list[FailureEvent], death: _Death | None) -> int | None:
    """Return the rank of the failure, at its first or a later mention in the log; else the rank that died first."""
    again = [event.rank for event in events if event.failure is first.failure is not None]
    ranks = [rank for rank in (first.rank, *again) if rank is not None]
    if ranks or death is None:
        return ranks[0] if ranks else None
    is_launchers = first.failure is not None and first.failure.code == _LAUNCHER_SAYS
    is_raised = first.raised and death.code > 0
    is_killed = not first.raised and death.code < 0 and first.failure is not None and first.weight <= 1
    return death.rank if is_launchers or is_raised or is_killed else None
