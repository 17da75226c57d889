"""explain(): from an error or a log to the known failure, its cause and its fix."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardwise.explaining.catalogue import Failure, catalogue
from shardwise.explaining.logs import (
    LAUNCHER,
    Line,
    Raised,
    bare_exceptions,
    by_speaker,
    last_progress,
    read_lines,
    read_tracebacks,
)

_INNER_RANK = re.compile(r"\[(?:[^\]]*\s)?Rank[ :]+(\d+)\]|-- [Pp]rocess (\d+)|\btask (\d+):", re.IGNORECASE)
LAUNCHER_SAYS = "SW558"
_ABORTED_AT_EXIT = "SW587"
_OWN = re.compile(r"^(?:shardwise\.errors\.\w+|error): .+(?:\n *(?:where|why|fix): .+(?:\n {9}.+)*)+", re.MULTILINE)
_OWN_FIELD = re.compile(r"^ *(where|why|fix): +(.+(?:\n(?! *(?:where|why|fix):).+)*)", re.MULTILINE)
_VARYING = re.compile(r"[0-9a-f]{4,}|\d{3,}|\d+\.\d+")


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """Something that went wrong, at a place in the log."""

    failure: Failure | None
    message: str
    rank: int | None
    line: int
    time: str | None
    speaker: tuple[str, int | None]
    raised: bool = False
    """It left a traceback."""

    @property
    def weight(self) -> int:
        """0 causes, known or not; 1 what looks like an error; 2 echoes; 3 the launcher's account; 4 warnings."""
        if self.failure is None:
            return 0 if self.raised else 1
        if self.failure.code == LAUNCHER_SAYS:
            return 3
        if self.failure.code == _ABORTED_AT_EXIT:
            return 1  # also after a failure, which then is what counts
        return {"cause": 0, "echo": 2, "warning": 4}[self.failure.kind]


_Hit = tuple[Failure, str]


def find_events(lines: list[Line]) -> list[FailureEvent]:
    """Every failure in the log that somebody did not survive."""
    alive = last_progress(lines)
    found: list[FailureEvent] = []
    for speaker, own in by_speaker(lines).items():
        found += [event for event in _of_speaker(own) if event.line >= alive.get(speaker, 0)]
    return found


def _of_speaker(own: list[Line]) -> Iterator[FailureEvent]:
    reading = read_tracebacks(own)
    hits = _hits([line for line in own if line.number not in reading.quoted])
    told: set[int] = set()
    for chain in reading.chains:
        told.update(*(raised.numbers for raised in chain))
        event = _of_chain([raised for raised in chain if raised.fatal], hits, own[0].rank)
        if event is not None:
            yield event
    for line in own:
        if line.text in hits and line.number not in told | reading.quoted:
            yield _event(hits[line.text], line, line.rank, line.time)
    for line in bare_exceptions(own):
        if line.number not in told | reading.quoted and line.text not in hits:
            yield FailureEvent(None, line.text, line.rank, line.number, line.time, line.speaker)


def _of_chain(chain: list[Raised], hits: dict[str, _Hit], speaker: int | None) -> FailureEvent | None:
    """The one exception of a chain that tells most: a known cause, else the one at its root."""
    own = [raised for raised in chain if raised.rank == speaker and raised.link == "inner"]
    wrapped = any(raised.link == "inner" for raised in chain)
    if own:  # every rank prints all ranks' failures: its own is the one to tell
        chain = [raised for raised in chain if raised in own or raised.link != "inner"]
    known = [(raised, hit) for raised in chain if (hit := _known(raised, hits))]
    for raised, hit in known:
        if hit[0].kind == "cause":
            return _event(hit, raised.line, raised.rank, raised.time, raised=True)
    echoes = [raised for raised, _ in known]
    unknown = [raised for raised in chain if raised not in echoes and not _is_wrapper(raised, chain)]
    if unknown:
        root = _root(unknown, wrapped=wrapped)
        text = "\n".join(root.rows if _OWN.match("\n".join(root.rows)) else root.rows[:8])
        return FailureEvent(None, text, root.rank, root.line.number, root.time, root.line.speaker, raised=True)
    if not known:
        return None
    raised, hit = known[0]
    return _event(hit, raised.line, raised.rank, raised.time, raised=True)


def _is_wrapper(raised: Raised, chain: list[Raised]) -> bool:
    after = chain[chain.index(raised) + 1 :]
    return bool(after) and after[0].link == "inner" and raised.link != "inner"


def _root(unknown: list[Raised], *, wrapped: bool) -> Raised:
    if wrapped:
        return next((raised for raised in unknown if raised.link == "inner"), unknown[0])
    index = len(unknown) - 1
    while index and unknown[index].link == "cause":
        index -= 1
    return unknown[index]


def _known(raised: Raised, hits: dict[str, _Hit]) -> _Hit | None:
    for failure in catalogue().values():  # pages that need to see where it was raised are the narrowest
        if failure.frames and failure.frames.search(raised.frames) and (match := failure.find(raised.rows[0])):
            return failure, match[0]
    rows = [raised.line.text, *raised.rows]
    found = [hits[row] for row in rows if row in hits]
    if not found and len(raised.rows) > 1:  # a terminal or a collector may have broken the message anywhere
        found = [hit for text in (" ".join(raised.rows), "".join(raised.rows)) if (hit := _best(text))]
    found += [hits[row] for row in raised.tail if row in hits and hits[row][0].kind == "cause"]
    return min(found, key=lambda hit: hit[0].kind != "cause", default=None)


def _event(hit: _Hit, line: Line, rank: int | None, time: str | None, *, raised: bool = False) -> FailureEvent:
    if rank is None and (named := _INNER_RANK.search(line.text)):
        rank = int(next(filter(None, named.groups())))
    return FailureEvent(hit[0], hit[1], rank, line.number, time, line.speaker, raised)


def _hits(lines: list[Line]) -> dict[str, _Hit]:
    """The known message in each text; lines that differ in their numbers only are looked at once."""
    shapes: dict[str, list[str]] = {}
    for text in {line.text: None for line in lines if line.text}:
        shapes.setdefault(_VARYING.sub("0", text), []).append(text)
    everything = "\n".join(texts[0] for texts in shapes.values())
    present = [failure for failure in catalogue().values() if not failure.frames and failure.find(everything)]
    hits: dict[str, _Hit] = {}
    for texts in shapes.values() if present else ():
        if _best(texts[0], present):
            hits.update((text, hit) for text in texts if (hit := _best(text, present)))
    for line in lines:  # the row of a traceback's end, as the traceback has it
        if line.text in hits:
            hits.setdefault(line.text.strip(" |"), hits[line.text])
    return hits


def _best(text: str, among: list[Failure] | None = None) -> _Hit | None:
    """The most specific message in `text`: a cause, the longest, the later page (which is the narrower)."""
    candidates = catalogue().values() if among is None else among
    found = [(failure, match[0]) for failure in candidates if not failure.frames and (match := failure.find(text))]
    return max(found, key=lambda hit: (hit[0].kind == "cause", len(hit[1]), hit[0].code), default=None)


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
    # Times are in seconds: a rank that the launcher ended (SIGTERM) was not the first to die within one.
    first = min((death for death in deaths if death), key=lambda death: (death.time, death.code == -15), default=None)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """What went wrong, as far as it is known."""

    failure: Failure | None
    """None when the text matches nothing that is known."""
    message: str
    """The text that was recognised; the first error of an unknown failure."""
    rank: int | None = None
    """The rank that failed first, where the log says."""
    line: int | None = None
    """Where in the text."""
    echoes: tuple[str, ...] = ()
    """Codes of what followed from it on other ranks."""

    def to_dict(self) -> dict[str, Any]:
        """For machines; `code` is None when nothing is known."""
        failure = self.failure
        known = (
            own_fields(self.message)
            if failure is None
            else {
                "name": failure.name,
                "what": failure.what,
                "why": failure.why,
                "fix": failure.fix,
                "torch": failure.torch,
                "sources": list(failure.sources),
            }
        )
        return {
            "code": failure and failure.code, "message": self.message, "rank": self.rank, "line": self.line,
            "echoes": list(self.echoes), **known,
        }  # fmt: skip

    def __str__(self) -> str:
        if self.failure is None:
            return _unknown(self)
        failure = self.failure
        place = ", ".join(
            part
            for part in (f"rank {self.rank}" if self.rank is not None else "", f"line {self.line}" if self.line else "")
            if part
        )
        rows = [
            f"{failure.code} {failure.name}" + (f" ({place})" if place else ""),
            failure.what,
            f"  message: {self.message}",
            f"  why:     {_flat(failure.why)}",
            f"  fix:     {_flat(failure.fix)}",
            f"  torch:   {failure.torch}",
        ]
        if failure.with_shardwise:
            rows.append(f"  with shardwise: {_flat(failure.with_shardwise)}")
        if self.echoes:
            rows.append(f"  also seen, as a consequence: {', '.join(self.echoes)}")
        rows += [f"  see:     {source}" for source in failure.sources]
        return "\n".join(rows)


def explain(problem: BaseException | str) -> Explanation:
    """Say what an error means: its cause, its fix, and the torch versions that have it.

    Args:
        problem: An exception; or a text: a message, a traceback, a whole log with the lines of many ranks, or a
            code of the catalogue.

    Returns:
        The explanation. Of several failures in a log it is the first that is no echo of another: not the time-outs
        of the ranks that waited, not the launcher's summary. An unknown failure is said to be unknown.

    Ranks:
        Local.
    """
    if isinstance(problem, BaseException):
        problem = _text_of(problem)
    if (failure := _by_code(problem.strip())) is not None:
        return Explanation(failure=failure, message=failure.patterns[0].pattern)
    lines, death = read_summary(read_lines(problem))
    events = find_events(lines)
    own = _OWN.search(problem)  # without a traceback, as our command prints it
    if not events:
        return Explanation(failure=None, message=own[0] if own else "")
    first = _first(events, death)
    if own and first.failure is None and own[0].partition("\n")[0] == first.message:
        first = replace(first, message=own[0])
    echoes = {event.failure.code for event in events if event.failure and event.failure.kind == "echo"}
    return Explanation(
        failure=first.failure,
        message=first.message,
        rank=_rank(first, events, death),
        line=first.line,
        echoes=tuple(sorted(echoes - {first.failure and first.failure.code})),
    )


def _first(events: list[FailureEvent], death: Death | None) -> FailureEvent:
    """Causes before echoes; then by the clock where all have one, by who died first, by the order of the lines."""
    weight = min(event.weight for event in events)
    rivals = _once([event for event in events if event.weight == weight])
    if weight > 0:  # an echo without a rank is one that its rank has said already
        rivals = [event for event in rivals if event.rank is not None] or rivals
    if all(event.time for event in rivals):
        return min(rivals, key=lambda event: (event.time or "", event.line))
    # The launcher's rank is the first to die, which is the first to fail only among those that failed alike.
    return min(rivals, key=lambda event: (death is None or event.rank != death.rank, event.line))


def _once(events: list[FailureEvent]) -> list[FailureEvent]:
    """A rank may say the same several times, with and without a clock: the first time counts."""
    seen: dict[tuple[object, ...], FailureEvent] = {}
    for event in sorted(events, key=lambda event: event.line):
        seen.setdefault((event.rank, event.failure.code if event.failure else event.message), event)
    return list(seen.values())


def _rank(first: FailureEvent, events: list[FailureEvent], death: Death | None) -> int | None:
    """The rank that the log gives the failure, there or where it tells of it again; else the first to die."""
    again = (event.rank for event in events if event.failure is first.failure is not None)
    rank = first.rank if first.rank is not None else next((rank for rank in again if rank is not None), None)
    if rank is not None or death is None:
        return rank
    launcher = first.failure is not None and first.failure.code == LAUNCHER_SAYS
    raised = first.raised and death.code > 0
    killed = not first.raised and death.code < 0 and first.failure is not None and first.weight <= 1
    return death.rank if launcher or raised or killed else None


def _by_code(text: str) -> Failure | None:
    failures = catalogue()
    wanted = text.upper()
    if wanted in failures:
        return failures[wanted]
    return next((failure for failure in failures.values() if text in {failure.alias, failure.name} - {""}), None)


def _text_of(error: BaseException) -> str:
    """The whole traceback: the message that counts may be that of a cause, or nested in another's text."""
    return "".join(traceback.format_exception(error))


def _unknown(explanation: Explanation) -> str:
    if not explanation.message:
        return "No error was found in this text: no traceback, and no message that is known."
    place = "" if explanation.rank is None else f" (rank {explanation.rank}, line {explanation.line})"
    if own_fields(explanation.message):
        return f"This is an error of shardwise's own{place}; it names its cause and its fix:\n  {explanation.message}"
    return (
        f"This error is not known{place}:\n  {explanation.message}\n"
        "It is the first failure in the text that is no echo of another, and nothing in the catalogue\n"
        "matches it. To have it added, report the text with the versions that `shardwise --version` and\n"
        "`python -m torch.utils.collect_env` print."
    )


def own_fields(message: str) -> dict[str, str]:
    """What shardwise's own error says: `what`, `where`, `why`, `fix`, those that it has; empty for another's."""
    if not _OWN.match(message):
        return {}
    what = message.partition("\n")[0].partition(": ")[2]
    return {"what": what, **{name: _flat(text) for name, text in _OWN_FIELD.findall(message)}}


def _flat(text: str) -> str:
    return " ".join(text.split())
