"""explain(): from an exception, a text or a log to the cause. It never guesses. No torch."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from shardwise.explaining.catalogue import Failure, catalogue
from shardwise.explaining.events import LAUNCHER_SAYS, Event, find_events
from shardwise.explaining.logs import read_lines
from shardwise.explaining.summary import Death, read_summary


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
            {}
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
    if not events:
        return Explanation(failure=None, message="")
    first = _first(events, death)
    echoes = {event.failure.code for event in events if event.failure and event.failure.kind == "echo"}
    return Explanation(
        failure=first.failure,
        message=first.message,
        rank=_rank(first, events, death),
        line=first.line,
        echoes=tuple(sorted(echoes - {first.failure and first.failure.code})),
    )


def _first(events: list[Event], death: Death | None) -> Event:
    """Causes before echoes; then by the clock where all have one, by who died first, by the order of the lines."""
    weight = min(event.weight for event in events)
    rivals = _once([event for event in events if event.weight == weight])
    if weight > 0:  # an echo without a rank is one that its rank has said already
        rivals = [event for event in rivals if event.rank is not None] or rivals
    if all(event.time for event in rivals):
        return min(rivals, key=lambda event: (event.time or "", event.line))
    # The launcher's rank is the first to die, which is the first to fail only among those that failed alike.
    return min(rivals, key=lambda event: (death is None or event.rank != death.rank, event.line))


def _once(events: list[Event]) -> list[Event]:
    """A rank may say the same several times, with and without a clock: the first time counts."""
    seen: dict[tuple[object, ...], Event] = {}
    for event in sorted(events, key=lambda event: event.line):
        seen.setdefault((event.rank, event.failure.code if event.failure else event.message), event)
    return list(seen.values())


def _rank(first: Event, events: list[Event], death: Death | None) -> int | None:
    """The rank that the log gives the failure, there or where it tells of it again; else the first to die."""
    again = (event.rank for event in events if event.failure is first.failure is not None)
    rank = first.rank if first.rank is not None else next((rank for rank in again if rank is not None), None)
    if rank is not None or death is None:
        return rank
    launcher = first.failure is not None and first.failure.code == LAUNCHER_SAYS
    raised = first.raised and death.code > 0
    killed = not first.raised and death.code < 0 and first.weight == 0
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
    return (
        f"This error is not known{place}:\n  {explanation.message}\n"
        "It is the first failure in the text that is no echo of another, and nothing in the catalogue\n"
        "matches it. To have it added, report the text with the versions that `shardwise --version` and\n"
        "`python -m torch.utils.collect_env` print."
    )


def _flat(text: str) -> str:
    return " ".join(text.split())
