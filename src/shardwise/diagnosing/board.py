"""A board that every rank of a machine can read: which collectives each rank has come to. No torch.

One file in shared memory, a slot a rank. A rank writes only its own slot; reading needs nobody's help, so it works
while the others hang, and still tells what a rank did last when it is dead.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RING = 1024
_RING_BYTES = 4 * RING
_HEAD_WORDS = 8
_TEXT_BYTES = 8192 - 8 * _HEAD_WORDS
_SLOT_BYTES = 8192 + _RING_BYTES
_COUNT, _STEP, _PID, _ENDED, _MOVED_AT, _TEXT_LENGTH, _ASKED = range(7)


class Slot:
    """One rank's part of the board."""

    def __init__(self, memory: memoryview) -> None:
        head_bytes = 8 * _HEAD_WORDS
        self._head = memory[:head_bytes].cast("Q")
        self._text = memory[head_bytes : head_bytes + _TEXT_BYTES]
        self._ring = memory[8192 : 8192 + _RING_BYTES].cast("I")

    @property
    def count(self) -> int:
        """How many events the rank has written."""
        return self._head[_COUNT]

    @property
    def step(self) -> int:
        """The step it is in, from 1."""
        return self._head[_STEP]

    @property
    def has_ended(self) -> bool:
        """Whether it said that no more events will come."""
        return bool(self._head[_ENDED])

    @property
    def is_alive(self) -> bool:
        """Whether its process still runs."""
        return self._head[_PID] == 0 or _runs(self._head[_PID])

    @property
    def seconds_still(self) -> float:
        """How long ago it wrote its last event."""
        return time.monotonic() - self._head[_MOVED_AT] / 1e6

    def event(self, index: int) -> int | None:
        """The event of that index; None when it has not come to it, or it is long past."""
        count = self.count
        return self._ring[index % RING] if count - RING <= index < count else None

    def open(self) -> None:
        """Say that this process writes here."""
        self._head[_PID] = os.getpid()
        self._head[_MOVED_AT] = int(time.monotonic() * 1e6)

    def write(self, event: int) -> None:
        """Add an event."""
        count = self._head[_COUNT]
        self._ring[count % RING] = event
        self._head[_MOVED_AT] = int(time.monotonic() * 1e6)
        self._head[_COUNT] = count + 1  # last: whoever sees it finds the event

    def set_step(self, step: int) -> None:
        """Note the step it is in."""
        self._head[_STEP] = step

    def end(self) -> None:
        """Say that no more events will come."""
        self._head[_ENDED] = 1

    def ask(self) -> None:
        """Ask the rank to say what it is doing."""
        self._head[_ASKED] += 1

    @property
    def times_asked(self) -> int:
        """How often somebody asked."""
        return self._head[_ASKED]

    def say(self, text: str) -> None:
        """Answer: replaces what was said before."""
        data = text.encode()[: _TEXT_BYTES - 8]
        self._head[_TEXT_LENGTH] = 0
        self._text[: len(data)] = data
        self._head[_TEXT_LENGTH] = len(data)

    @property
    def said(self) -> str:
        """What the rank said last."""
        return bytes(self._text[: self._head[_TEXT_LENGTH]]).decode(errors="replace")

    def release(self) -> None:
        """Let go of the memory."""
        for view in (self._head, self._text, self._ring):
            view.release()


@dataclass(slots=True)
class Board:
    """The slots of all ranks."""

    slots: Sequence[Slot]
    memory: mmap.mmap
    view: memoryview

    def close(self) -> None:
        """Let go of the memory; the last process to do so frees it."""
        for slot in self.slots:
            slot.release()
        self.view.release()
        with contextlib.suppress(BufferError):
            self.memory.close()


def create_board(num_ranks: int) -> Path:
    """Make the file of a board, in memory where the machine has a place for that.

    Ranks:
        Local: one rank of each machine makes it, all open it, and that rank removes the name.
    """
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    descriptor, name = tempfile.mkstemp(prefix="shardwise-board-", dir=folder)
    try:
        os.truncate(descriptor, num_ranks * _SLOT_BYTES)
    finally:
        os.close(descriptor)
    return Path(name)


def open_board(path: Path, num_ranks: int) -> Board:
    """Open a board that exists."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(descriptor, num_ranks * _SLOT_BYTES)
    finally:
        os.close(descriptor)
    view = memoryview(memory)
    slots = [Slot(view[rank * _SLOT_BYTES : (rank + 1) * _SLOT_BYTES]) for rank in range(num_ranks)]
    return Board(slots, memory, view)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"
