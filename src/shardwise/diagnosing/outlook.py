"""What the board tells one rank about the others: who differs, who is missing, who is late. No torch."""

from __future__ import annotations

from collections import deque

from shardwise.diagnosing.board import HISTORY, Board
from shardwise.diagnosing.divergence import Difference, describe_absence, describe_difference, from_text
from shardwise.diagnosing.inquiry import note_place
from shardwise.errors import ShardError

_SILENT_SECONDS = 3.5


class Outlook:
    """The board as seen from one rank; reads only.

    Args:
        board: Of this rank's machine.
        rank: This rank's place on it.
        groups: Names of the groups that events are about.
    """

    def __init__(self, board: Board, rank: int, groups: tuple[str, ...]) -> None:
        self.slots, self.rank, self._groups = board.slots, rank, groups
        self.slot = board.slots[rank]
        self._steps: deque[tuple[int, int]] = deque([(0, 1)], maxlen=HISTORY)
        self._compared = [0] * len(self.slots)

    def note_step(self) -> None:
        """Remember at which event this rank's step began."""
        self._steps.append((self.slot.count, self.slot.step))

    def first_difference(self) -> int | None:
        """The first place at which another rank, by what has newly arrived, did something else."""
        own = self.slot.count
        found: list[int] = []
        for rank, slot in enumerate(self.slots):
            end = min(own, slot.count)
            start = max(self._compared[rank], end - HISTORY, slot.first)
            if start < end:
                if self.slot.events(start, end) != slot.events(start, end):
                    differing = (i for i in range(start, end) if self.slot.event(i) != slot.event(i))
                    found.append(next(differing, end))
                else:
                    self._compared[rank] = end
        first = min(found, default=own)
        return first if first < own else None

    def difference_at(self, index: int) -> Difference | None:
        """What ranks did at a place, if not all did the same."""
        step = next((step for count, step in reversed(list(self._steps)) if count <= index), self._steps[0][1])
        return describe_difference(self.slots, index, step, self._groups)

    def verdict_of_others(self) -> ShardError | None:
        """What another rank found to be wrong."""
        found = ((rank, slot.verdict) for rank, slot in enumerate(self.slots) if rank != self.rank)
        read = (from_text(text, rank) for rank, text in found if text)
        return next((verdict[0] for verdict in read if verdict is not None), None)

    def note_places(self, error: ShardError) -> None:
        """Add to an error where those ranks are that have found something themselves."""
        for rank, slot in enumerate(self.slots):
            if rank != self.rank and slot.verdict is not None:
                note_place(error, rank, slot)

    def missing(self) -> int | None:
        """A rank that will never come to where this one is: dead, or out of the loop."""
        lost = [rank for rank, slot in enumerate(self.slots) if slot.has_ended or not slot.is_alive]
        return next((rank for rank in lost if self.slots[rank].count < self.slot.count), None)

    def dead(self) -> int | None:
        """A rank that is dead, or on a machine that is silent, wherever it was."""
        for rank, slot in enumerate(self.slots):
            if not slot.is_alive or (not slot.has_ended and slot.seconds_unheard > _SILENT_SECONDS):
                return rank
        return None

    def late(self, patience: float) -> int | None:
        """A rank that has not come to where this one is, and has not moved for so long."""
        behind = (rank for rank, slot in enumerate(self.slots) if slot.count < self.slot.count)
        return next((rank for rank in behind if self.slots[rank].seconds_still > patience), None)

    def absence_of(self, rank: int) -> ShardError:
        """The error for a rank that does not come to where this one waits."""
        return describe_absence(self.slots, self.rank, rank, self._groups)

    def cause_of_failure(self) -> ShardError | None:
        """Which rank is the reason that a collective of this one failed, if one is."""
        index = self.first_difference()
        difference = None if index is None else self.difference_at(index)
        if difference is not None:
            return difference.error
        if (verdict := self.verdict_of_others()) is not None:
            return verdict
        culprit = self.missing()
        culprit = self.dead() if culprit is None else culprit
        return None if culprit is None else self.absence_of(culprit)
