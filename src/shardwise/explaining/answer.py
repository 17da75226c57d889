"""explain(): from an exception, a text or a log to the cause. It never guesses. No torch."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from shardwise.explaining.catalogue import Failure, catalogue
from shardwise.explaining.logs import Line, by_rank, exceptions, read_lines

_NO_TIME = "~"  # sorts after every digit


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
    lines = read_lines(problem)
    found = sorted(_recognised(lines), key=_precedence)
    if not found:
        return _first_error(lines)
    failure, message, line = found[0]
    echoes = {other.code for other, _, _ in found[1:] if other.kind == "echo" and other is not failure}
    return Explanation(failure=failure, message=message, rank=line.rank, line=line.number, echoes=tuple(sorted(echoes)))


_Found = tuple[Failure, str, Line]


def _recognised(lines: list[Line]) -> list[_Found]:
    """Every message in the lines that the catalogue knows; the most specific of those in one place."""
    found: list[_Found] = []
    for own in by_rank(lines).values():
        text = "\n".join(line.text for line in own)
        starts = [0]
        for line in own:
            starts.append(starts[-1] + len(line.text) + 1)
        best: dict[int, _Found] = {}
        for failure in catalogue().values():
            for pattern in failure.patterns:
                for match in pattern.finditer(text):
                    index = next(i for i in range(len(own)) if starts[i] <= match.start() < starts[i + 1])
                    there = best.get(index)
                    if there is None or len(match[0]) >= len(there[1]):  # later pages are the narrower ones
                        best[index] = (failure, match[0], own[index])
        found.extend(best.values())
    return found


def _precedence(found: _Found) -> tuple[int, str, int]:
    failure, _, line = found
    # A cause before a warning before an echo; then the clock, where the lines have one; then the order.
    return ["cause", "warning", "echo"].index(failure.kind), line.time or _NO_TIME, line.number


def _first_error(lines: list[Line]) -> Explanation:
    raised = sorted(
        (error for own in by_rank(lines).values() for error in exceptions(own)), key=lambda error: error.first.number
    )
    if not raised:
        return Explanation(failure=None, message="")
    first = raised[0]
    return Explanation(failure=None, message=first.text, rank=first.first.rank, line=first.first.number)


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
        "It is the first one in the text, and nothing in the catalogue matches it. To have it added, report the text"
        "\nwith the versions that `shardwise --version` and `python -m torch.utils.collect_env` print."
    )


def _flat(text: str) -> str:
    return " ".join(text.split())
