"""Compare traces before each collective, and tell which rank differs while others wait."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.diagnosing.collective_trace import (
    HISTORY,
    Board,
    Difference,
    Slot,
    describe_absence,
    describe_difference,
    from_text,
    to_text,
)
from shardwise.diagnosing.peer_traces import Machines, Mirror
from shardwise.errors import ShardError

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
