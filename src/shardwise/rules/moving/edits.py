"""Edits of a text by position: what no edit touches stays as it is, byte for byte. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.errors import SourceError
from shardwise.findings import Edit


def change(start: int, end: int, text: str) -> Edit:
    """An edit; with `start == end`, an insertion."""
    return Edit(start=start, end=end, text=text)


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """The text with all edits made; insertions at one place keep the order they were given in.

    Raises:
        SourceError: Two edits overlap. It is a bug of a rule, never of the text.
    """
    pieces: list[str] = []
    done = 0
    # Two rules may ask for the very same change: made once.
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
