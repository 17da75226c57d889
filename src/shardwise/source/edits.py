"""Apply edits to a file's text."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.errors import SourceError
from shardwise.findings import Edit, SourceFinding


def change(start: int, end: int, text: str) -> Edit:
    """An edit; with `start == end`, an insertion."""
    return Edit(start=start, end=end, text=text)


def apply(text: str, edits: Iterable[Edit]) -> str:
    """The text with all edits made, equal ones once; insertions at one place keep the order they were given in.

    Raises:
        SourceError: Two edits overlap.
    """
    pieces: list[str] = []
    done = 0
    for edit in sorted(dict.fromkeys(edits), key=lambda one: (one.start, one.end)):
        if edit.start < done:
            raise SourceError(
                f"two rewrites touch the same text, {text[edit.start : edit.end]!r}",
                why="each rule must leave alone what another has taken",
                fix="report it, with the file",
            )
        pieces += [text[done : edit.start], edit.text]
        done = edit.end
    return "".join([*pieces, text[done:]])


def choose(findings: Iterable[SourceFinding]) -> list[SourceFinding]:
    """The findings whose edits can be applied together: earlier ones first, those that would overlap left out.

    The rest are found again once these are applied.
    """
    chosen: list[SourceFinding] = []
    taken: set[Edit] = set()
    for finding in findings:
        fresh = [edit for edit in finding.edits if edit not in taken]
        if finding.edits and not any(_overlap(edit, other) for edit in fresh for other in taken):
            chosen.append(finding)
            taken.update(fresh)
    return chosen


def _overlap(one: Edit, other: Edit) -> bool:
    if one.start == one.end or other.start == other.end:  # insertions: not inside another, and not at one place
        return one.start <= other.end and other.start <= one.end
    return one.start < other.end and other.start < one.end
