"""Apply edits to a file's text."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.findings import Edit, SourceFinding


def apply(text: str, edits: Iterable[Edit]) -> str:
    """The text after edits that do not overlap."""
    for edit in sorted(set(edits), key=lambda edit: (edit.start, edit.end), reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


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
