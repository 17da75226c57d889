"""The guard's thread: answers when asked, and rings the alarm when this rank cannot go on. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.diagnosing.board import Slot
from shardwise.diagnosing.divergence import Difference, to_text
from shardwise.diagnosing.inquiry import Inquiry, stack_of
from shardwise.diagnosing.outlook import Outlook
from shardwise.errors import ShardError

LOOK_SECONDS = 0.25
_DEAD_SECONDS = 1.0
_STUCK_SECONDS = 2.0


class Alarm:
    """Why this rank cannot go on, once that is known. Made by the training thread."""

    def __init__(self, slot: Slot) -> None:
        self.error: ShardError | None = None
        self.was_raised = False
        """Whether the training thread has got it."""
        self._slot, self.main = slot, threading.get_ident()

    def ring(self, error: ShardError) -> None:
        """Set it, and let the other ranks know, and where the training thread is."""
        self.error = error
        self._slot.conclude(to_text(error, stack_of(self.main)))


@dataclass(frozen=True, slots=True)
class _Case:
    """Something the thread has found, while it waits for answers."""

    error: ShardError
    inquiry: Inquiry
    differs_at: int | None = None
    """The place of a difference."""
    waits_at: int | None = None
    """Where this rank waits; once it moves on, nothing was wrong."""
    is_final: bool = True
    """Whether nothing can mend it."""


class Watcher:
    """Looks at the board four times a second.

    Args:
        outlook: On the board.
        alarm: What it rings.
        patience: Seconds without progress after which it speaks of late ranks.
        report: What it speaks with.
        abort: Called when the training thread is stuck in something that will not end.
    """

    def __init__(
        self,
        outlook: Outlook,
        alarm: Alarm,
        *,
        patience: float,
        report: Callable[[str], None],
        abort: Callable[[], None],
    ) -> None:
        self._outlook, self._slot, self._alarm = outlook, outlook.slot, alarm
        self._patience, self._report, self._abort = patience, report, abort
        self._case: _Case | None = None
        self._answered, self._moved_to, self._spoke_at = self._slot.times_asked, 0, -1
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwise-guard", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._closed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def say(self, error: ShardError) -> None:
        """Report it, with the stacks that belong to it."""
        self._report("\n".join([str(error), *getattr(error, "__notes__", [])]))

    def _run(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            self._note_progress()
            if self._alarm.error is not None:
                self._abort_if_stuck()
            elif self._case is not None:
                self._conclude(self._case)
            elif (index := self._outlook.first_difference()) is not None:
                self._meet_difference(index)
            elif self._slot.count and self._slot.seconds_still > _DEAD_SECONDS:
                self._look_for_absent()

    def _note_progress(self) -> None:
        if self._slot.count != self._moved_to:
            self._moved_to = self._slot.count
            self._slot.touch()
        if self._slot.times_asked > self._answered:
            self._answered = self._slot.times_asked
            if self._alarm.error is None:
                self._slot.say(stack_of(self._alarm.main))

    def _abort_if_stuck(self) -> None:
        if not self._alarm.was_raised and self._slot.seconds_still > _STUCK_SECONDS:
            self._alarm.was_raised = True
            self._abort()

    def _meet_difference(self, index: int) -> None:
        difference = self._outlook.difference_at(index)
        if difference is None:
            return
        self._slot.want_all()
        if self._slot.seconds_still < LOOK_SECONDS:
            # It goes on with data that are mixed up: stop it at once.
            self._ring(difference.error)
        else:
            self._case = _Case(difference.error, ask_about(difference, self._outlook), differs_at=index)

    def _look_for_absent(self) -> None:
        is_late, here = self._slot.seconds_still > self._patience, self._slot.count
        missing, slots = self._outlook.missing(), self._outlook.slots
        if (verdict := self._outlook.verdict_of_others()) is not None:
            self._case = _Case(verdict, Inquiry(slots, []), waits_at=here)
        elif missing is not None:
            if is_late or not slots[missing].is_alive:
                self._case = _Case(self._outlook.absence_of(missing), Inquiry(slots, []), waits_at=here)
        elif is_late and self._spoke_at != here and (late := self._outlook.late(self._patience)) is not None:
            error = self._outlook.absence_of(late)
            self._case = _Case(error, Inquiry(slots, [late]), waits_at=here, is_final=False)  # it may still come

    def _conclude(self, case: _Case) -> None:
        """Say what is wrong once the answers are there, and ring the alarm if this rank cannot go on."""
        if not case.inquiry.is_over:
            return
        self._case = None
        if case.waits_at is not None and case.waits_at != self._slot.count:
            return  # whom it waited for has come
        error = case.error
        if case.differs_at is not None and (seen := self._outlook.difference_at(case.differs_at)) is not None:
            error = seen.error  # by now other machines have been heard
        case.inquiry.add_notes(error)
        if case.is_final:
            self._ring(error)
        else:
            self._spoke_at = self._slot.count
            self.say(error)

    def _ring(self, error: ShardError) -> None:
        self.say(error)
        self._alarm.ring(error)


def ask_about(difference: Difference, outlook: Outlook) -> Inquiry:
    """Ask the other ranks where they are, first those that are odd."""
    ranks = sorted(range(len(outlook.slots)), key=lambda rank: rank not in difference.odd)
    return Inquiry(outlook.slots, [rank for rank in ranks if rank != outlook.rank])
