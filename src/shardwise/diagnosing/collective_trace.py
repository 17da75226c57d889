"""The trace of collectives that each rank writes into shared memory, and where two traces differ."""

from __future__ import annotations

import contextlib
import enum
import json
import mmap
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ShardError


class Kind(enum.IntEnum):
    """What a rank is about to do together with the others."""

    GATHER_FORWARD = 0
    GATHER_EVALUATION = 1
    """A forward without gradients."""
    GATHER_BACKWARD = 2
    REDUCE = 3


_NAMES = {
    Kind.GATHER_FORWARD: "gather of {} for a forward",
    Kind.GATHER_EVALUATION: "gather of {} for a forward without gradients",
    Kind.GATHER_BACKWARD: "gather of {} for backward",
    Kind.REDUCE: "reduction of the gradients of {}",
}


def encode(kind: Kind, group: int, num_elements: int) -> int:
    """Two bits of kind, fourteen of the group, sixteen that tell buffers of different sizes apart."""
    return kind << 30 | (group & 0x3FFF) << 16 | zlib.crc32(num_elements.to_bytes(8, "little")) & 0xFFFF


def kind_of(event: int) -> Kind:
    """What kind of collective it is."""
    return Kind(event >> 30)


def group_of(event: int) -> int:
    """Which group it is about."""
    return event >> 16 & 0x3FFF


def in_words(event: int, groups: Sequence[str]) -> str:
    """As in "gather of `layers.0` for backward"."""
    return _NAMES[kind_of(event)].format(f"`{groups[group_of(event)]}`")


def comes_first(event: int, other: int) -> bool:
    """Whether, in a usual step, `event` would happen before `other`; groups are numbered as the modules stand."""
    kinds = kind_of(event), kind_of(other)
    forward = {Kind.GATHER_FORWARD, Kind.GATHER_EVALUATION}
    if kinds[0] in forward and kinds[1] in forward:
        return group_of(event) < group_of(other)
    if kinds[0] in forward or kinds[1] in forward:
        # A rank in a forward while another is in backward has a forward more to do.
        return kinds[0] in forward
    return group_of(event) > group_of(other)


HISTORY = 1024
# Twice what is read: copying up to HISTORY new events at once overwrites nothing that a reader still takes for valid.
_RING = 2 * HISTORY
_MASK = _RING - 1
_HEAD_WORDS = 16
_TEXT_BYTES = 8192 - 8 * _HEAD_WORDS
_SLOT_BYTES = 8192 + 4 * _RING
_COUNT, _STEP, _PID, _ENDED, _MOVED_AT, _TEXT_LENGTH, _ASKED, _SAID, _CONCLUDED, _WANTS_ALL = range(10)
_HEARD_AT, _IS_GONE, _FIRST = range(10, 13)  # of copies only


class Slot:
    """One rank's part of the board."""

    def __init__(self, memory: memoryview) -> None:
        head_bytes = 8 * _HEAD_WORDS
        self._head = memory[:head_bytes].cast("Q")
        self._text = memory[head_bytes : head_bytes + _TEXT_BYTES]
        self._ring = memory[8192:_SLOT_BYTES].cast("I")

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
    def is_copy(self) -> bool:
        """Whether the rank runs on another machine, and this is what was last heard of it."""
        return bool(self._head[_HEARD_AT])

    @property
    def is_alive(self) -> bool:
        """Whether its process still runs, as far as is known."""
        if self.is_copy:
            return not self._head[_IS_GONE]
        return self._head[_PID] == 0 or _runs(self._head[_PID])

    @property
    def seconds_still(self) -> float:
        """How long ago it was seen to write an event."""
        return time.monotonic() - self._head[_MOVED_AT] / 1e6

    @property
    def seconds_unheard(self) -> float:
        """How long ago its machine was last heard of; 0 for a rank of this one."""
        return time.monotonic() - self._head[_HEARD_AT] / 1e6 if self.is_copy else 0.0

    @property
    def times_asked(self) -> int:
        """How often somebody on this machine asked what it is doing."""
        return self._head[_ASKED]

    @property
    def times_said(self) -> int:
        """How often it has answered."""
        return self._head[_SAID]

    @property
    def said(self) -> str:
        """What the rank said last."""
        return bytes(self._text[: self._head[_TEXT_LENGTH]]).decode(errors="replace")

    @property
    def verdict(self) -> str | None:
        """What the rank found to be wrong, if it did; it stands in place of answers."""
        return self.said if self._head[_CONCLUDED] else None

    @property
    def wants_all(self) -> bool:
        """Whether the rank needs to know of every machine, not only of those next to its own."""
        return bool(self._head[_WANTS_ALL])

    def event(self, index: int) -> int | None:
        """The event of that index; None when it has not come to it, or it is long past."""
        count = self.count
        return self._ring[index & _MASK] if max(count - HISTORY, self._head[_FIRST]) <= index < count else None

    @property
    def first(self) -> int:
        """The first event that can be read."""
        return max(self.count - HISTORY, self._head[_FIRST])

    def events(self, start: int, end: int) -> bytes:
        """The events from one index up to another, four bytes each; they must be among the last HISTORY."""
        first, last = start & _MASK, end & _MASK
        if first <= last:
            return self._ring[first:last].tobytes()
        return self._ring[first:].tobytes() + self._ring[:last].tobytes()

    def open(self) -> None:
        """Say that this process writes here."""
        self._head[_PID], self._head[_STEP] = os.getpid(), 1
        self.touch()

    def write(self, event: int) -> None:
        """Add an event."""
        count = self._head[_COUNT]
        self._ring[count & _MASK] = event
        self._head[_COUNT] = count + 1  # last: whoever sees it finds the event

    def touch(self, seconds_ago: float = 0.0) -> None:
        """Note when the rank was last seen to move."""
        self._head[_MOVED_AT] = int((time.monotonic() - seconds_ago) * 1e6)

    def set_step(self, step: int) -> None:
        """Note the step it is in."""
        self._head[_STEP] = step

    def end(self) -> None:
        """Say that no more events will come."""
        self._head[_ENDED] = 1

    def ask(self) -> None:
        """Ask the rank to say what it is doing."""
        self._head[_ASKED] += 1

    def want_all(self) -> None:
        """Let whoever talks to the other machines know that this rank needs to see all of them."""
        self._head[_WANTS_ALL] = 1

    def say(self, text: str, *, times: int = 0) -> None:
        """Answer: replaces what was said before. `times`: how often it has said something, where this is a copy."""
        data = text.encode()[:_TEXT_BYTES]
        self._head[_TEXT_LENGTH] = 0
        self._text[: len(data)] = data
        self._head[_TEXT_LENGTH] = len(data)
        self._head[_SAID] = times or self._head[_SAID] + 1

    def conclude(self, verdict: str) -> None:
        """Say what is wrong with the run, for all to read, also when this process is gone."""
        self.say(verdict)
        self._head[_CONCLUDED] = 1

    def become_copy(self, *, count: int, step: int, last: bytes) -> None:
        """Show what was heard of a rank on another machine; `last` are its last events, at most HISTORY."""
        events = memoryview(last).cast("I")
        if count - len(events) > self.count:
            self._head[_FIRST] = count - len(events)  # what was between has not been heard
        start = (count - len(events)) & _MASK
        up_to_edge = min(len(events), _RING - start)
        self._ring[start : start + up_to_edge] = events[:up_to_edge]
        self._ring[: len(events) - up_to_edge] = events[up_to_edge:]
        self._head[_STEP], self._head[_COUNT] = step, count

    def note_state(self, *, has_ended: bool, is_gone: bool, has_concluded: bool) -> None:
        """Show how a rank on another machine is now, after its events and what it said."""
        self._head[_HEARD_AT] = int(time.monotonic() * 1e6)
        self._head[_CONCLUDED], self._head[_ENDED], self._head[_IS_GONE] = has_concluded, has_ended, is_gone

    def release(self) -> None:
        """Let go of the memory."""
        for view in (self._head, self._text, self._ring):
            view.release()

    def writer(self, others: Sequence[Slot]) -> Callable[[int], bool]:
        """A function that adds an event, and says whether one of the others seems to have another at its place.

        It runs before each collective of a training step, so it does nothing else.
        """
        head, ring = self._head, self._ring
        near = tuple((other._head, other._ring) for other in others)
        count = head[_COUNT]

        def write(event: int) -> bool:
            nonlocal count
            index, place = count, count & _MASK
            ring[place] = event
            head[_COUNT] = count = index + 1
            for their_head, their_ring in near:  # noqa: SIM110 - any() would take as long as all the rest
                if their_head[_COUNT] > index and their_ring[place] != event:
                    return True
            return False

        return write


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
    descriptor, name = tempfile.mkstemp(prefix="shardwise-board-", dir=board_folder())
    try:
        os.truncate(descriptor, num_ranks * _SLOT_BYTES)
    finally:
        os.close(descriptor)
    return Path(name)


def board_folder() -> str:
    """Where boards are kept: shared memory, or the place of temporary files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


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


_WHY = (
    "every gather and every reduction is a collective of all ranks; ranks that run different modules wait for each "
    "other for ever, or mix up each other's data"
)
_FIX = (
    "run the same modules on every rank: a dummy batch where a rank has none for a tower, `lockstep(loader)` where "
    "loaders differ in length; parameters that only some ranks use: ShardConfig(unused_parameters='reduce')"
)

_SILENT_SECONDS = 3.0
_MAX_TEXT = 1500  # five of them, quoted, fit on the board


@dataclass(frozen=True, slots=True)
class Difference:
    """Ranks that came to different collectives at the same place."""

    error: ShardError
    odd: tuple[int, ...]
    """The ranks that did not do what the others did."""


def describe_difference(slots: Sequence[Slot], index: int, step: int, groups: Sequence[str]) -> Difference | None:
    """What differs at a place that belongs to `step`; None where nothing does."""
    ranks_at: dict[int, list[int]] = {}
    for rank, slot in enumerate(slots):
        if (event := slot.event(index)) is not None:
            ranks_at.setdefault(event, []).append(rank)
    if len(ranks_at) < 2:
        return None
    skipped, others = _skipped(ranks_at)
    odd = sorted(rank for event in others for rank in ranks_at[event])
    rows = [f"{_ranks(ranks)}: {in_words(event, groups)}" for event, ranks in sorted(ranks_at.items(), key=_first_rank)]
    sentence = _sentence(skipped, others[0], odd, groups, step)
    return Difference(ShardError(sentence, where="; ".join(rows), why=_WHY, fix=_FIX), tuple(odd))


def describe_absence(slots: Sequence[Slot], rank: int, absent: int, groups: Sequence[str]) -> ShardError:
    """The error for a rank that will not come to the collective in which `rank` waits."""
    waiting, missing = slots[rank], slots[absent]
    event = waiting.event(waiting.count - 1)
    doing = f"is in the {in_words(event, groups)}" if event is not None else "waits"
    if not missing.is_alive:
        return ShardError(
            f"rank {absent} died in step {missing.step}",
            where=f"rank {rank} {doing} and waits for it; {_last(missing, absent, groups)}",
            why="its process is gone: killed (out of memory?), crashed, or ended by an error of its own",
            fix=f"read the log of rank {absent}; `dmesg` says whether the system killed it",
        )
    if missing.has_ended:
        return ShardError(
            f"rank {absent} has left the training loop after {max(missing.step - 1, 0)} steps; rank {rank} goes on",
            where=f"rank {rank} {doing} in step {waiting.step}",
            why="its data ended earlier, or it broke out of the loop alone",
            fix="for batch in shardwise.lockstep(loader): ... stops all ranks together",
        )
    if missing.seconds_unheard > _SILENT_SECONDS:
        return ShardError(
            f"rank {absent} died in step {missing.step}, or its machine cannot be reached",
            where=f"rank {rank} {doing} and waits for it; {_last(missing, absent, groups)}",
            why=f"nothing has been heard from its machine for {missing.seconds_unheard:.0f} s",
            fix=f"read the log of rank {absent}; see whether its machine still runs, and its network",
        )
    return ShardError(
        f"rank {absent} has not come to what rank {rank} waits for since {missing.seconds_still:.0f} s",
        where=f"rank {rank} {doing} in step {waiting.step}; {_last(missing, absent, groups)}",
        why="it is busy with something else (loading data, saving, evaluating), or hangs",
        fix="see where it is, below",
    )


def to_text(error: ShardError, stack: str) -> str:
    """An error as a rank leaves it on the board, with where that rank was."""
    parts = [error.what, error.where, error.why, error.fix, stack[-_MAX_TEXT:]]
    return json.dumps([part[:_MAX_TEXT] for part in parts])


def from_text(text: str, rank: int) -> tuple[ShardError, str] | None:
    """The error that `rank` left on the board, and where it was; None if only a part of it has arrived."""
    try:
        what, where, why, fix, stack = json.loads(text)
    except ValueError:
        return None
    error = ShardError(what, where=where, why=why, fix=fix)
    error.add_note(f"(found by rank {rank})")
    return error, stack


def _skipped(ranks_at: dict[int, list[int]]) -> tuple[int, list[int]]:
    """The event that somebody left out, and the events of those who did.

    Most ranks are right; of two equally many, those have skipped something that are further in the step.
    """
    events = list(ranks_at)
    size = max(len(ranks) for ranks in ranks_at.values())
    largest = [event for event in events if len(ranks_at[event]) == size]
    usual = largest[0]
    for event in largest[1:]:
        if comes_first(event, usual):
            usual = event
    others = [event for event in events if event != usual]
    if len(largest) == 1 and len(others) == 1 and comes_first(others[0], usual):
        # A minority runs something that the majority does not: it is they who are odd, but what is missing is theirs.
        return others[0], [usual]
    return usual, others


def _sentence(skipped: int, other: int, odd: list[int], groups: Sequence[str], step: int) -> str:
    name = groups[group_of(skipped)]
    kinds = kind_of(skipped), kind_of(other)
    if group_of(skipped) == group_of(other):
        if kinds[0] == kinds[1]:
            return f"{_ranks(odd)} brought other gradients or shapes of `{name}` than the rest at step {step}"
        if Kind.GATHER_EVALUATION in kinds:
            return f"{_ranks(odd)} ended an evaluation, or began one, without the others at step {step}"
    done = "reduce the gradients of" if kinds[0] is Kind.REDUCE else "run"
    return f"{_ranks(odd)} did not {done} `{name}` at step {step}"


def _last(slot: Slot, rank: int, groups: Sequence[str]) -> str:
    event = slot.event(slot.count - 1) if slot.count else None
    return f"last on rank {rank}: {in_words(event, groups)}" if event is not None else f"nothing yet on rank {rank}"


def _first_rank(entry: tuple[int, list[int]]) -> int:
    return entry[1][0]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
