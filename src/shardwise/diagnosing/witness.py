"""One rank's view of the board: writes what it does, compares with its neighbours, and watches from a thread.

It knows names and numbers only, nothing of the model, so that the thread keeps no model alive. No torch.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from shardwise.diagnosing.board import Board
from shardwise.diagnosing.divergence import describe_absence, describe_difference
from shardwise.errors import ShardError

_LOOK_SECONDS = 0.25
_ANSWER_SECONDS = 2.0
_MAX_RANKS_ASKED = 8
_MAX_FRAMES = 6


class Witness:
    """Writes this rank's events and tells what is wrong with the others'.

    Args:
        board: Of all ranks.
        rank: This one's place on it.
        groups: Names of the groups that events are about.
        patience: Seconds without progress after which the thread speaks up.
        report: What it speaks with.
    """

    def __init__(
        self, board: Board, rank: int, groups: Sequence[str], patience: float, report: Callable[[str], None]
    ) -> None:
        self.board, self.rank, self._groups = board, rank, groups
        self._patience, self._report = patience, report
        self.slot = board.slots[rank]
        self.slot.open()
        self.slot.set_step(1)
        num_ranks = len(board.slots)
        # Three are enough: whoever differs differs from one of its neighbours.
        self._neighbours = sorted({0, (rank - 1) % num_ranks, (rank + 1) % num_ranks} - {rank})
        self._main = threading.get_ident()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="shardwise-guard", daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether it has stopped watching."""
        return self._closed.is_set()

    def close(self) -> None:
        """Stop watching, and tell the others that this rank will not come any more."""
        if self._closed.is_set():
            return
        self._closed.set()
        self.slot.end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def write(self, event: int) -> None:
        """Write an event, and raise if a neighbour did something else at the same place."""
        if self._closed.is_set():
            return
        index = self.slot.count
        self.slot.write(event)
        for neighbour in self._neighbours:
            theirs = self.board.slots[neighbour].event(index)
            if theirs is not None and theirs != event:
                error = describe_difference(self.board.slots, index, self._groups)
                assert error is not None
                raise self._with_stacks(error, range(len(self.board.slots)))

    def explain_failure(self) -> ShardError | None:
        """Why a collective of this rank failed, where another rank is the reason."""
        if self._closed.is_set():
            return None
        time.sleep(_LOOK_SECONDS)  # a dying process needs a moment
        return self._find_difference() or self._find_absence(still_for=None)

    def _find_difference(self) -> ShardError | None:
        index = self.slot.count - 1
        return None if index < 0 else describe_difference(self.board.slots, index, self._groups)

    def _find_absence(self, still_for: float | None) -> ShardError | None:
        """A rank that has not come to where this one is: gone, or still for longer than that."""
        slots = self.board.slots
        behind = [rank for rank, slot in enumerate(slots) if slot.count < self.slot.count]
        for rank in behind:
            if not slots[rank].is_alive or slots[rank].has_ended:
                return describe_absence(slots, self.rank, rank, self._groups)
        still = [rank for rank in behind if still_for is not None and slots[rank].seconds_still > still_for]
        if not still:
            return None
        return self._with_stacks(describe_absence(slots, self.rank, still[0], self._groups), still[:1])

    def _with_stacks(self, error: ShardError, ranks: Sequence[int]) -> ShardError:
        """The error with a note of where each of those ranks is."""
        slots = self.board.slots
        wanted = [rank for rank in ranks if rank != self.rank and slots[rank].is_alive][:_MAX_RANKS_ASKED]
        asked = {rank: slots[rank].times_asked for rank in wanted}
        for rank in wanted:
            slots[rank].ask()
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline and not all(_answers(slots[rank].said, asked[rank]) for rank in wanted):
            time.sleep(0.02)
        for rank in wanted:
            text = slots[rank].said.partition("\n")[2]
            if text:
                error.add_note(f"rank {rank} is here:\n{text}")
        return error

    def _watch(self) -> None:
        """The thread: answers when asked, and speaks up when this rank waits for one that does not come."""
        answered, said_at = self.slot.times_asked, -1
        while not self._closed.wait(_LOOK_SECONDS):
            if self.slot.times_asked > answered:
                answered = self.slot.times_asked
                self.slot.say(f"{answered}\n{_stack_of(self._main)}")
            count = self.slot.count
            if count and count != said_at and self.slot.seconds_still > self._patience:
                verdict = self._find_difference() or self._find_absence(still_for=self._patience)
                if verdict is not None:
                    said_at = count
                    self._report("\n".join([str(verdict), *getattr(verdict, "__notes__", [])]))


def _answers(said: str, before: int) -> bool:
    number = said.partition("\n")[0]
    return number.isdigit() and int(number) > before


def _stack_of(thread: int) -> str:
    """Where a thread is: the user's own frames, innermost last."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    frames = traceback.extract_stack(frame)
    own = [entry for entry in frames if "/torch/" not in entry.filename and "/shardwise/" not in entry.filename]
    return "".join(traceback.format_list((own or frames)[-_MAX_FRAMES:]))
