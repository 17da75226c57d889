"""One rank's part in the guard: writes what it does, compares with the others, and raises. No torch.

It knows names and numbers only, nothing of the model, so that its threads keep no model alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.diagnosing.board import Board
from shardwise.diagnosing.divergence import Difference
from shardwise.diagnosing.machines import Machines
from shardwise.diagnosing.mirror import Mirror
from shardwise.diagnosing.outlook import Outlook
from shardwise.diagnosing.watcher import LOOK_SECONDS, Alarm, Watcher, ask_about
from shardwise.errors import ShardError

_EXPLAIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """Where a witness stands, and how it speaks."""

    board: Board
    machines: Machines
    rank: int
    """Its place on the board."""
    groups: tuple[str, ...]
    """Names of the groups that events are about."""
    patience: float
    """Seconds without progress after which the thread speaks up."""
    report: Callable[[str], None]
    """What it speaks with."""
    abort: Callable[[], None]
    """Called, from the thread, when this rank is stuck in something that will not end."""
    mirror: Mirror | None = None
    """Where there are other machines."""


class Witness:
    """Writes this rank's events and tells what is wrong with the others'."""

    def __init__(self, post: Post) -> None:
        self.slot = post.board.slots[post.rank]
        self._outlook = Outlook(post.board, post.rank, post.groups)
        self._alarm = Alarm(self.slot)
        self._watcher = Watcher(
            self._outlook, self._alarm, patience=post.patience, report=post.report, abort=post.abort
        )
        self._mirror = post.mirror
        self._announce = None if post.mirror is None else post.mirror.announce
        self._write = self.slot.writer([post.board.slots[rank] for rank in _neighbours(post.machines, post.rank)])
        self.is_closed = False
        self.found_at_end: ShardError | None = None
        """A difference that was seen only when the guard was closed."""

    @property
    def alarm(self) -> ShardError | None:
        """Why this rank cannot go on: the next event raises it."""
        return self._alarm.error

    def start(self) -> None:
        """Begin to watch."""
        self._watcher.start()
        if self._mirror is not None:
            self._mirror.start()

    def close(self) -> None:
        """Stop watching, and tell the others that this rank will not come any more."""
        if self.is_closed:
            return
        self.is_closed = True
        self.slot.end()
        self._watcher.close()
        if self._mirror is not None:
            self._mirror.close()
            self._compare_once_more()

    def _compare_once_more(self) -> None:
        """What other machines did last may have arrived only now."""
        index = self._outlook.first_difference() if self.alarm is None else None
        difference = None if index is None else self._outlook.difference_at(index)
        if difference is not None:
            self.found_at_end = difference.error
            self._watcher.say(difference.error)

    def write(self, event: int) -> None:
        """Write an event, and raise if somebody did something else at the same place."""
        if self._alarm.error is not None:
            self.raise_alarm()
        if self._write(event):
            self._raise_difference(self.slot.count - 1)
        if self._announce is not None:
            self._announce()

    def catch_up(self, num_events: int) -> None:
        """Write the next events as others have written them: this rank took part in them in another way."""
        end = self.slot.count + num_events
        slots = self._outlook.slots
        deadline = time.monotonic() + _EXPLAIN_SECONDS
        while (furthest := max(slots, key=lambda slot: slot.count)).count < end and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS / 10)  # word from another machine takes a moment
        for index in range(self.slot.count, end):
            if (event := furthest.event(index)) is not None:
                self.write(event)

    def next_step(self) -> None:
        """Note that a step has ended."""
        self.slot.set_step(self.slot.step + 1)
        self._outlook.note_step()
        if self._announce is not None:
            self._announce()

    def raise_alarm(self) -> None:
        """Raise what the thread has found, if anything."""
        if self._alarm.error is not None and not self.is_closed:
            self._alarm.was_raised = True
            self._outlook.note_places(self._alarm.error)
            raise self._alarm.error

    def explain_failure(self) -> ShardError | None:
        """Why a collective of this rank failed, where another rank is the reason."""
        deadline = time.monotonic() + (_EXPLAIN_SECONDS if self._mirror is not None else 0)
        self.slot.want_all()
        verdict = None
        while not self.is_closed and verdict is None:
            time.sleep(LOOK_SECONDS)  # a dying process needs a moment, and so does word from another machine
            verdict = self.alarm or self._outlook.cause_of_failure()
            if time.monotonic() > deadline:
                break
        if verdict is not None:
            self._alarm.was_raised = True
            self._alarm.ring(verdict)
            self._outlook.note_places(verdict)
        return verdict

    def _earliest_difference(self, index: int) -> Difference | None:
        """What differs at a place, or before it, where word from another machine has come late."""
        first = self._outlook.first_difference()
        earlier = self._outlook.difference_at(first) if first is not None and first < index else None
        return earlier or self._outlook.difference_at(index)

    def _raise_difference(self, index: int) -> None:
        difference = self._earliest_difference(index)
        if difference is None:
            return  # what seemed to differ was long past
        self.slot.want_all()
        inquiry = ask_about(difference, self._outlook)
        inquiry.wait()
        difference = self._earliest_difference(index) or difference  # by now other machines may have been heard
        inquiry.add_notes(difference.error)
        self._alarm.was_raised = True
        self._alarm.ring(difference.error)
        raise difference.error


def _neighbours(machines: Machines, rank: int) -> list[int]:
    """Three of this machine and one of the next: whoever differs differs from one of its neighbours."""
    local = machines.local
    place = local.index(rank)
    chosen = {local[0], local[place - 1], local[(place + 1) % len(local)]}
    chosen |= {machines.ranks[(machines.own + 1) % len(machines.ranks)][0]}
    return sorted(chosen - {rank})
