"""Create edits, choose compatible ones, and apply them to a text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from shardwise.errors import SourceError
from shardwise.findings import Edit, SourceFinding
from shardwise.source.syntax import FileContext


def change(start: int, end: int, text: str) -> Edit:
    """Return an edit; with `start == end`, an insertion."""
    return Edit(start=start, end=end, text=text)


def without_names(
    file: FileContext, node: ast.Import | ast.ImportFrom, gone: list[ast.alias], *, drop_comment: bool = False
) -> list[Edit]:
    """Return edits that remove names, or all of an import; none if it is unclear what to remove.

    A statement with a comment after it is not removed, unless `drop_comment`.
    """
    text, span = file.text, file.positions.span
    start, end = span(node)
    if gone and len(gone) == len(node.names):
        line_start, behind = file.positions.starts[node.lineno - 1], file.positions.line_end(end)
        is_only = len(file.block(node)) == 1 and not isinstance(file.parents[node], ast.Module)
        rest = text[end:behind].strip()
        if is_only:
            return [change(start, end, "pass")]
        is_alone = not text[line_start:start].strip() and (not rest or (drop_comment and rest.startswith("#")))
        return [change(line_start, behind, "")] if is_alone else []
    edits: list[Edit] = []
    for alias in gone:
        begin, behind = span(alias)
        comma = re.compile(r"[ \t]*,[ \t]*").match(text, behind)
        if comma:
            line_start = text.rfind("\n", 0, begin) + 1
            line = re.compile(r"[ \t]*(?:#[^\r\n]*)?\r?\n").match(text, comma.end())
            is_alone = not text[line_start:begin].strip() and line_start > start
            edits.append(change(line_start, line.end(), "") if is_alone and line else change(begin, comma.end(), ""))
        else:  # the last name: removed together with removed names before it
            kept_end = max(span(one)[1] for one in node.names if one not in gone)
            if "#" in text[kept_end:behind]:
                return []  # comments between the names: to be edited by hand
            edits = [edit for edit in edits if edit.start < kept_end]
            edits.append(change(kept_end, behind, ""))
    return edits


def apply(text: str, edits: Iterable[Edit]) -> str:
    """Apply all edits, equal ones once; insertions at one position keep their given order.

    Raises:
        SourceError: Two edits overlap.
    """
    pieces: list[str] = []
    done = 0
    for edit in sorted(dict.fromkeys(edits), key=lambda one: (one.start, one.end)):
        if edit.start < done:
            raise SourceError(
                f"two rewrites touch the same text, {text[edit.start : edit.end]!r}",
                why="edits of different rules must not overlap",
                fix="report it, with the file",
            )
        pieces += [text[done : edit.start], edit.text]
        done = edit.end
    return "".join([*pieces, text[done:]])


def choose(findings: Iterable[SourceFinding]) -> list[SourceFinding]:
    """Return findings whose edits can be applied together: of overlapping ones, the first.

    The others are found again after these are applied.
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
    if one.start == one.end or other.start == other.end:  # insertions: not inside another edit or at the same place
        return one.start <= other.end and other.start <= one.end
    return one.start < other.end and other.start < one.end
