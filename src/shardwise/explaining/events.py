"""From the lines of a log to the failures in it: known by the catalogue, or merely seen. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.explaining.catalogue import Failure, catalogue
from shardwise.explaining.logs import Line, by_speaker, last_progress
from shardwise.explaining.tracebacks import Raised, bare_exceptions, read_tracebacks

_INNER_RANK = re.compile(r"\[(?:[^\]]*\s)?Rank[ :]+(\d+)\]|-- [Pp]rocess (\d+)|\btask (\d+):", re.IGNORECASE)
LAUNCHER_SAYS = "SW558"
_VARYING = re.compile(r"[0-9a-f]{4,}|\d{3,}|\d+\.\d+")


@dataclass(frozen=True, slots=True)
class Event:
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
        return {"cause": 0, "echo": 2, "warning": 4}[self.failure.kind]


_Hit = tuple[Failure, str]


def find_events(lines: list[Line]) -> list[Event]:
    """Every failure in the log that somebody did not survive."""
    alive = last_progress(lines)
    found: list[Event] = []
    for speaker, own in by_speaker(lines).items():
        found += [event for event in _of_speaker(own) if event.line >= alive.get(speaker, 0)]
    return found


def _of_speaker(own: list[Line]) -> Iterator[Event]:
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
            yield Event(None, line.text, line.rank, line.number, line.time, line.speaker)


def _of_chain(chain: list[Raised], hits: dict[str, _Hit], speaker: int | None) -> Event | None:
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
        text = "\n".join(root.rows[:8])
        return Event(None, text, root.rank, root.line.number, root.time, root.line.speaker, raised=True)
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


def _event(hit: _Hit, line: Line, rank: int | None, time: str | None, *, raised: bool = False) -> Event:
    if rank is None and (named := _INNER_RANK.search(line.text)):
        rank = int(next(filter(None, named.groups())))
    return Event(hit[0], hit[1], rank, line.number, time, line.speaker, raised)


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
