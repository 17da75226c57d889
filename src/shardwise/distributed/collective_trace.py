"""The trace of collectives that each rank writes to shared memory, its exchange between machines, and comparison."""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import socket
import tempfile
import threading
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from shardwise import compat
from shardwise.distributed.agreement import gather_objects
from shardwise.errors import ShardError


class CollectiveKind(enum.IntEnum):
    """Kind of the next collective of a rank."""

    ALL_GATHER_FORWARD = 0
    ALL_GATHER_EVALUATION = 1
    """A forward without gradients."""
    ALL_GATHER_BACKWARD = 2
    REDUCE_SCATTER = 3


_NAMES = {
    CollectiveKind.ALL_GATHER_FORWARD: "all-gather of {} for a forward",
    CollectiveKind.ALL_GATHER_EVALUATION: "all-gather of {} for a forward without gradients",
    CollectiveKind.ALL_GATHER_BACKWARD: "all-gather of {} for backward",
    CollectiveKind.REDUCE_SCATTER: "reduce-scatter of the gradients of {}",
}
_PLACES = {
    CollectiveKind.ALL_GATHER_FORWARD: "in the forward of {}",
    CollectiveKind.ALL_GATHER_EVALUATION: "in the forward of {}",
    CollectiveKind.ALL_GATHER_BACKWARD: "in the backward of {}",
    CollectiveKind.REDUCE_SCATTER: "after the backward of {}",
}
_STEP = 0xFFFF_0000


def encode(kind: CollectiveKind, group: int, num_elements: int) -> int:
    """Encode an event: two bits of kind, fourteen of the group, sixteen of the buffer size."""
    return kind << 30 | group << 16 | zlib.crc32(num_elements.to_bytes(8, "little")) & 0xFFFF


def is_step(event: int) -> bool:
    """Whether the event is an optimizer step."""
    return event >= _STEP


def kind_of(event: int) -> CollectiveKind:
    """Return the kind of an event; not for optimizer steps."""
    return CollectiveKind(event >> 30)


def group_of(event: int) -> int:
    """Return the group number of an event; not for optimizer steps."""
    return event >> 16 & 0x3FFF


class GroupNames:
    """Names of the groups in events, for all models of the same ranks.

    Args:
        names: The groups of the first model.
    """

    MAX_GROUPS = 0x3FFF

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names: dict[int, tuple[str, str]] = {}
        self._steps: dict[int, str] = {}
        self._num_of_class: Counter[str] = Counter()
        self._num_groups = 0
        self.num_models = 0
        """Number of compared models; with more than one, messages name the model of each group."""
        self.add("", names)

    def add(self, model: str, names: Sequence[str]) -> list[int]:
        """Number the groups of a model; the same numbers on all ranks that add the same models."""
        self._num_of_class[model] += 1
        if (number := self._num_of_class[model]) > 1:
            model = f"{model} #{number}"
        numbers = [(self._num_groups + index) % self.MAX_GROUPS for index in range(len(names))]
        self._names |= {number: (model, name) for number, name in zip(numbers, names, strict=True)}
        self._num_groups += len(names)
        return numbers

    def add_step(self, parameters: Sequence[tuple[int, int]]) -> int:
        """Return the step event of an optimizer with these parameters, each given as its group and its index there.

        A step is not a collective, but the collectives before it must be the same on all ranks.
        """
        event = _STEP | zlib.crc32(repr(parameters).encode()) & 0xFFFF
        models = {self._names[group][0] for group, _ in parameters}
        paths = [self._names[group][1].replace(".", "/") for group, _ in parameters]
        path = os.path.commonpath(paths).replace("/", ".") if len(models) == 1 else ""
        module = f" of `{path}`" if path not in ("", "(root)") else ""
        self._steps[event] = module + (f" of {' and '.join(sorted(models))}" if self.num_models > 1 else "")
        return event

    def name(self, event: int) -> str:
        """The module name of the event's group."""
        return self._names.get(group_of(event), ("", "?"))[1]

    def model(self, event: int) -> str:
        """The model name of the event's group."""
        return self._names.get(group_of(event), ("", "?"))[0]

    def in_words(self, event: int) -> str:
        """Describe an event, as in "all-gather of `layers.0` for backward"."""
        return self._step(event) if is_step(event) else _NAMES[kind_of(event)].format(self.full_name(event))

    def place_of(self, event: int) -> str:
        """Describe the place of an event, as in "in the backward of `layers.0`"."""
        return (
            f"in the {self._step(event)}" if is_step(event) else _PLACES[kind_of(event)].format(self.full_name(event))
        )

    def full_name(self, event: int) -> str:
        """The name of the event's group, as in "`layers.0`", or with several models "`layers.0` of Decoder"."""
        return f"`{self.name(event)}`" + (f" of {self.model(event)}" if self.num_models > 1 else "")

    def _step(self, event: int) -> str:
        return f"optimizer step{self._steps.get(event, '')}"


HISTORY = 1024
# Twice the readable part: copying up to HISTORY new events at once overwrites no event that a reader considers valid.
_RING = 2 * HISTORY
_MASK = _RING - 1
_TEXT_BYTES = 8064


class RankTrace(ctypes.Structure):
    """One rank's trace: its last collectives, its state, and the stack of its training thread or its error.

    It is in memory shared by the ranks of a machine; the trace of a rank on another machine is a copy.
    """

    _fields_ = (
        ("count", ctypes.c_uint64),  # events the rank has written
        ("step", ctypes.c_uint64),  # current step, from 1
        ("agreed_steps", ctypes.c_uint64),  # optimizer steps compared with other machines
        ("pid", ctypes.c_uint64),
        ("moved_at", ctypes.c_double),  # time of the last observed event
        ("sent_at", ctypes.c_double),  # time of the copy, on the clock of its machine
        ("heard_at", ctypes.c_double),  # arrival of the copy, on the clock of this machine
        ("text_length", ctypes.c_uint64),
        ("text_count", ctypes.c_uint64),  # events written when the text was set
        ("has_ended", ctypes.c_bool),  # its guard was closed: no more events follow
        ("is_gone", ctypes.c_bool),  # its process has ended; in copies only
        ("has_concluded", ctypes.c_bool),  # the text is a verdict
        ("wants_all", ctypes.c_bool),  # it needs the traces of all machines, not only of neighbors
        ("text_bytes", ctypes.c_char * _TEXT_BYTES),
        ("ring", ctypes.c_uint32 * _RING),
    )

    @property
    def is_alive(self) -> bool:
        """Whether its process is running, as far as known."""
        return not self.is_gone if self.heard_at else self.pid == 0 or _runs(self.pid)

    @property
    def has_left(self) -> bool:
        """Whether the rank writes no more events."""
        return self.has_ended or not self.is_alive

    @property
    def seconds_still(self) -> float:
        """Seconds since its last observed event."""
        return time.monotonic() - self.moved_at

    @property
    def seconds_unheard(self) -> float:
        """Seconds since the last message of its machine; 0 for a rank of this machine."""
        return time.monotonic() - self.heard_at if self.heard_at else 0.0

    @property
    def text(self) -> str:
        """The last recorded stack of its training thread, or its error."""
        return self.text_bytes[: self.text_length].decode(errors="replace")

    @property
    def is_text_current(self) -> bool:
        """Whether the text matches the rank's current event, or is final."""
        return self.has_concluded or (self.text_length > 0 and self.text_count == self.count)

    @property
    def verdict(self) -> str | None:
        """The error that the rank found, if any."""
        return self.text if self.has_concluded else None

    @property
    def first(self) -> int:
        """Index of the first event that can be read."""
        return max(self.count - HISTORY, 0)

    def event(self, index: int) -> int | None:
        """Return the event of an index; None if the rank has not reached it, or it was overwritten."""
        return self.ring[index & _MASK] if self.first <= index < self.count else None

    def events(self, start: int, end: int) -> bytes:
        """The events from index `start` to `end`, four bytes each; they must be among the last HISTORY."""
        ring = memoryview(self.ring).cast("B")
        first, last = 4 * (start & _MASK), 4 * (end & _MASK)
        return bytes(ring[first:last]) if first <= last else bytes(ring[first:]) + bytes(ring[:last])

    def open(self) -> None:
        """Record that this process writes this trace."""
        self.pid, self.step = os.getpid(), 1
        self.touch()

    def touch(self, seconds_ago: float = 0.0) -> None:
        """Record the time of the last observed progress."""
        self.moved_at = time.monotonic() - seconds_ago

    def set_text(self, text: str, *, is_verdict: bool = False) -> None:
        """Replace the text; an error stays readable after this process ends."""
        data = text.encode()[:_TEXT_BYTES]
        self.text_length = 0
        self.text_bytes = data
        self.text_length, self.text_count, self.has_concluded = len(data), self.count, is_verdict

    def to_bytes(self) -> bytes:
        """Serialize the trace for other machines."""
        message = RankTrace.from_buffer_copy(self)
        message.sent_at = time.monotonic()
        # A rank that makes progress is alive; asking the system is slower.
        message.is_gone = self.seconds_still > _GONE_SECONDS and not self.is_alive
        return bytes(message)

    def copy_from(self, message: bytes) -> None:
        """Load the trace of a rank on another machine."""
        theirs = RankTrace.from_buffer_copy(message)
        if theirs.count < self.count:
            return  # another rank of this machine has copied a later message
        theirs.heard_at = time.monotonic()
        theirs.moved_at += theirs.heard_at - theirs.sent_at
        count, theirs.count = theirs.count, self.count
        ctypes.memmove(ctypes.byref(self), ctypes.byref(theirs), ctypes.sizeof(self))
        self.count = count  # last: a reader that sees the count finds the events

    def writer(self, others: Sequence[RankTrace]) -> Callable[[int], bool]:
        """Return a function that appends an event, and returns whether another rank may have a different one.

        It runs before each collective of a training step, so it must be fast.
        """
        ring, near = self.ring, tuple((other, other.ring) for other in others)
        count = self.count

        def write(event: int) -> bool:
            nonlocal count
            index, place = count, count & _MASK
            ring[place] = event
            self.count = count = index + 1  # last: a reader that sees the count finds the event
            for other, their_ring in near:  # noqa: SIM110 - any() would double the time
                if other.count > index and their_ring[place] != event:
                    return True
            return False

        return write


def create_shared_trace(num_ranks: int) -> Path:
    """Create the file, in shared memory if available.

    Ranks:
        Local: one rank of each machine creates it, all ranks open it, and the first rank unlinks it.
    """
    descriptor, name = tempfile.mkstemp(prefix="shardwise-trace-", dir=shared_folder())
    try:
        # Not `truncate`: with full memory it would succeed, and the first write would kill the process.
        os.posix_fallocate(descriptor, 0, num_ranks * ctypes.sizeof(RankTrace))
    except OSError:
        os.unlink(name)
        raise
    finally:
        os.close(descriptor)
    return Path(name)


def open_shared_trace(path: Path, num_ranks: int) -> list[RankTrace]:
    """Open the traces of all ranks in an existing file; the memory is freed with the last trace."""
    size = ctypes.sizeof(RankTrace)
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), num_ranks * size)
    return [RankTrace.from_buffer(memory, rank * size) for rank in range(num_ranks)]


def shared_folder() -> str:
    """Return the folder of shared traces: shared memory, or the temporary folder."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


_GONE_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of a run, in the order of their first ranks."""

    ranks: tuple[tuple[int, ...], ...]
    """The ranks of each machine."""
    own: int
    """Index of this process's machine."""

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of this machine."""
        return self.ranks[self.own]

    @property
    def others(self) -> tuple[int, ...]:
        """All machines but this one."""
        return tuple(machine for machine in range(len(self.ranks)) if machine != self.own)

    @property
    def near(self) -> tuple[int, ...]:
        """Return the first machine and the two neighbors: any difference is visible between neighbors."""
        count = len(self.ranks)
        return tuple(sorted({0, (self.own - 1) % count, (self.own + 1) % count} - {self.own}))


def group_by_machine(names: Sequence[str], rank: int) -> Machines:
    """Group ranks by the names of their machines, as seen from `rank`."""
    ranks: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        ranks.setdefault(name, []).append(number)
    return Machines(tuple(map(tuple, ranks.values())), list(ranks).index(names[rank]))


def machine_name() -> str:
    """A name that two processes share if they see each other's shared memory and process numbers.

    A host name alone is not enough: containers of one host may share the name but not the memory.
    """
    parts = [socket.gethostname(), str(os.stat(shared_folder()).st_dev)]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)


_STILL_SECONDS = 1.0
_STEP_SECONDS = 5.0
_STEP_SLICE = timedelta(seconds=0.25)
_MAX_MISSED = 3  # steps with a late machine, after which waiting stops


class StoreExchange:
    """Exchanges traces between machines: each rank writes its own to the store, one rank per machine reads the others.

    Args:
        traces: The traces of all ranks, in the shared memory of this machine.
        machines: The ranks of each machine.
        rank: The rank of this process.
        store: A store connection for exclusive use.
    """

    def __init__(self, traces: Sequence[RankTrace], machines: Machines, rank: int, store: dist.Store) -> None:
        self._traces, self._machines, self._rank = traces, machines, rank
        self._store: dist.Store | None = store
        self._lock = threading.Lock()
        self._received: dict[int, bytes] = {}
        self.steps: StepAgreement | None = None
        """The step agreement, on the first rank of a machine."""

    @property
    def in_trouble(self) -> bool:
        """Whether a rank of this machine stalls or has left, so that all machines are read."""
        local = [self._traces[rank] for rank in self._machines.local]
        return any(trace.wants_all or trace.has_ended or trace.seconds_still > _STILL_SECONDS for trace in local)

    def publish(self) -> None:
        """Write this rank's trace to the store."""
        self._attempt(lambda store: self._publish(store, self._rank))

    def exchange(self, *, with_all: bool = False) -> None:
        """Publish this rank's trace; the first active rank of a machine also reads those of other machines.

        Args:
            with_all: Read the traces of all machines; otherwise of the near ones, unless `in_trouble`.
        """
        self._attempt(lambda store: self._exchange(store, with_all or self.in_trouble))

    def _attempt(self, work: Callable[[dist.Store], None]) -> None:
        with self._lock:  # the training thread publishes too
            if self._store is not None:
                try:
                    work(self._store)
                except RuntimeError:
                    self._store = None  # the process with the store is gone; received traces stay

    def _publish(self, store: dist.Store, rank: int) -> None:
        store.set(str(rank), zlib.compress(self._traces[rank].to_bytes(), 1))  # pyrefly: ignore[bad-argument-type]

    def _exchange(self, store: dist.Store, with_all: bool) -> None:
        self._publish(store, self._rank)
        local = self._machines.local
        if not all(self._traces[rank].has_left for rank in local if rank < self._rank):
            return  # another rank of this machine reads
        for rank in local:
            if not self._traces[rank].is_alive:
                self._publish(store, rank)  # on behalf of the dead process
        wanted = self._machines.others if with_all else self._machines.near
        ranks = [rank for machine in wanted for rank in self._machines.ranks[machine]]
        for rank, message in zip(ranks, store.multi_get([str(rank) for rank in ranks]), strict=True):
            if self._received.get(rank) != message:
                self._received[rank] = message
                self._traces[rank].copy_from(zlib.decompress(message))


class StepAgreement:
    """Compares trace digests between machines before an optimizer step. Used by the first rank of each machine.

    Each machine writes a digest to the store and reads all digests: two round trips per step.

    Args:
        store: A store connection for exclusive use, with a short timeout: a machine may skip the step for a reason.
        machine: The index of this machine.
        num_machines: Number of machines.
    """

    def __init__(self, store: dist.Store, machine: int, num_machines: int) -> None:
        self._store, self._machine, self._num_machines = store, machine, num_machines
        self._step = self._num_missed = 0

    def is_shared(self, digest: str, waiting: Callable[[], None]) -> bool:
        """Whether no machine has a different digest.

        Args:
            digest: Digest of the events of this machine's ranks.
            waiting: Called periodically while other machines are late; may raise.
        """
        if self._num_missed >= _MAX_MISSED:
            return True
        self._step += 1
        deadline = time.monotonic() + _STEP_SECONDS
        with suppress(RuntimeError):  # the store is gone
            self._store.set(f"step/{self._step}/{self._machine}", digest)
            # Every machine at the last step has read the digest of the step before it.
            self._store.delete_key(f"step/{self._step - 2}/{self._machine}")
            while time.monotonic() < deadline:
                with suppress(RuntimeError):  # a machine is late
                    found = self._store.multi_get([f"step/{self._step}/{each}" for each in range(self._num_machines)])
                    return set(found) == {digest.encode()}
                waiting()
        self._num_missed += 1
        return True


def open_traces(
    process_group: dist.ProcessGroup, machine: str | None
) -> tuple[list[RankTrace], Machines, StoreExchange | None]:
    """Open the shared memory of this machine, and the exchange with other machines.

    Args:
        process_group: The participating ranks.
        machine: The name of this machine; ranks of the same name share memory. Default: detected.

    Returns:
        The traces by rank in the group, the machines, and the exchange between machines if there are several.

    Raises:
        ShardError: A rank cannot open the file that the first rank of its machine created.

    Ranks:
        Collective over the group.
    """
    rank, size = process_group.rank(), process_group.size()
    names = gather_objects((machine or machine_name(), uuid.uuid4().hex), group=process_group)
    machines = group_by_machine([name for name, _ in names], rank)
    own_path, traces, problem = None, [], None
    try:
        own_path = create_shared_trace(size) if rank == machines.local[0] else None
    except OSError as error:
        problem = str(error)
    path = gather_objects(own_path, group=process_group)[machines.local[0]]
    try:
        traces = open_shared_trace(path, size) if path is not None else []
    except OSError as error:
        problem = str(error)
    problems = gather_objects(problem, group=process_group)
    if own_path is not None:
        own_path.unlink()
    if failed := [(rank, text) for rank, text in enumerate(problems) if text is not None]:
        raise ShardError(
            f"rank {failed[0][0]} cannot open the shared trace of its machine: {failed[0][1]}",
            where=shared_folder(),
            why="ranks of one machine share a file in memory; containers of one host may not share memory",
            fix="guard(model, machine=...) with another name in each container; or free the memory",
        )
    traces[rank].open()
    exchange = None
    if len(machines.ranks) > 1:
        prefix = f"shardwise-guard/{names[0][1]}"
        exchange = StoreExchange(traces, machines, rank, compat.store_connector(prefix)())
        if rank == machines.local[0]:
            store = compat.store_connector(prefix, _STEP_SLICE)()
            exchange.steps = StepAgreement(store, machines.own, len(machines.ranks))
        exchange.publish()
        gather_objects(None, group=process_group)  # every rank has published its trace
        exchange.exchange(with_all=True)
        gather_objects(None, group=process_group)  # the first rank of each machine has read them
    return traces, machines, exchange
