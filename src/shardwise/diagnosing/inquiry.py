"""Asking ranks where they are: each answers on the board with the stack of its training thread. No torch."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Sequence

from shardwise.diagnosing.board import Slot
from shardwise.diagnosing.divergence import from_text

_ANSWER_SECONDS = 2.0
_MAX_RANKS_ASKED = 8
_MAX_FRAMES = 6


class Inquiry:
    """A question to some ranks, and their answers as they come."""

    def __init__(self, slots: Sequence[Slot], ranks: Sequence[int]) -> None:
        able = [rank for rank in ranks if slots[rank].is_alive and not slots[rank].has_ended]
        wanted = able[:_MAX_RANKS_ASKED]
        self._slots = slots
        self._said_before = {rank: slots[rank].times_said for rank in wanted}
        for rank in wanted:
            slots[rank].ask()
        self._deadline = time.monotonic() + _ANSWER_SECONDS

    @property
    def is_over(self) -> bool:
        """Whether all have answered, or had long enough."""
        return time.monotonic() > self._deadline or len(self._answered()) == len(self._said_before)

    def wait(self) -> None:
        """Wait until it is over; for a thread that need not answer itself."""
        while not self.is_over:
            time.sleep(0.02)

    def add_notes(self, error: BaseException) -> None:
        """Add to an error where each rank is that has answered."""
        for rank in self._answered():
            note_place(error, rank, self._slots[rank])

    def _answered(self) -> list[int]:
        return [
            rank
            for rank, before in self._said_before.items()
            if self._slots[rank].times_said > before or self._slots[rank].verdict is not None
        ]


def note_place(error: BaseException, rank: int, slot: Slot) -> None:
    """Add to an error where a rank is, by what it said last."""
    verdict = slot.verdict
    found = None if verdict is None else from_text(verdict, rank)
    stack = slot.said if verdict is None else found[1] if found else ""
    note = f"rank {rank} is here:\n{stack}"
    if stack and note not in getattr(error, "__notes__", []):
        error.add_note(note)


def stack_of(thread: int) -> str:
    """Where a thread is: the user's own frames, innermost last."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    frames = traceback.extract_stack(frame)
    own = [entry for entry in frames if "/torch/" not in entry.filename and "/shardwise/" not in entry.filename]
    return "".join(traceback.format_list((own or frames)[-_MAX_FRAMES:]))
