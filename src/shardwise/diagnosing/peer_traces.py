"""Traces of ranks on other machines, exchanged through the store."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise import compat
from shardwise.diagnosing.collective_trace import HISTORY, Board, Slot, board_folder, create_board, open_board
from shardwise.errors import ShardError


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of a run, in the order of their first ranks."""

    ranks: tuple[tuple[int, ...], ...]
    """The ranks of each machine."""
    own: int
    """The machine of this process."""

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
        """The first machine and the two next to this one: whoever differs differs from one of its neighbours."""
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

    A host name alone is not enough: containers of one host may have the same name and memory of their own.

    Ranks:
        Local.
    """
    return f"{socket.gethostname()}/{_boot()}/{os.stat(board_folder()).st_dev}/{_process_namespace()}"


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _process_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


_REST_SECONDS = 0.25
_TROUBLE_SECONDS = 0.1
_STILL_SECONDS = 1.0
_GONE_SECONDS = 0.3
_CLOSE_SECONDS = 3.0
_LAST_EVENTS = 256
_START = struct.Struct("<QI")  # when it was written, how many asks follow
_ASK = struct.Struct("<IQ")  # which rank, how often it was asked from here
_LAST = struct.Struct("<QQ")  # count, step
_SLOT = struct.Struct("<QQQQ3BII")  # count, step, microseconds still, times said; flags; bytes of events and text


class Store(Protocol):
    """What is needed of torch's stores."""

    def set(self, key: str, value: bytes) -> None:
        """Keep a value."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys that exist."""
        ...


class Mirror:
    """Copies the slots of other machines to this machine's board, and lets them copy its own.

    Args:
        board: This machine's.
        machines: Who is where.
        rank: This process.
        connect: Makes a connection to the store that no other thread uses.
        announces: Whether `announce` is used.
    """

    def __init__(
        self, board: Board, machines: Machines, rank: int, connect: Callable[[], Store], *, announces: bool
    ) -> None:
        self._board, self._machines, self._rank = board, machines, rank
        self._connect = connect
        self._store: Store | None = None
        self._announcing = connect() if announces else None
        self._stamps: dict[int, int] = {}
        self._asked: dict[tuple[int, int], int] = {}
        self._is_lost = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwise-guard-mirror", daemon=True)

    def publish_first(self) -> None:
        """Write this machine's slots, before anybody asks for them.

        Ranks:
            The first rank of each machine, before `start` on any.
        """
        for machine in self._machines.others:
            for rank in self._machines.ranks[machine]:
                slot = self._board.slots[rank]
                slot.become_copy(count=0, step=1, last=b"")
                slot.note_state(has_ended=False, is_gone=False, has_concluded=False)
                slot.touch()
        self._publish(self._connected())
        for rank in self._machines.local:
            self._connected().set(f"last/{rank}", _LAST.pack(0, 1))

    def announce(self) -> None:
        """Leave this rank's last events in the store at once, should its process not survive the next moment.

        gloo ends the process where ranks bring buffers of different sizes, before any thread could tell.
        """
        if self._announcing is not None:
            slot = self._board.slots[self._rank]
            count = slot.count
            last = slot.events(max(count - _LAST_EVENTS, 0), count)
            try:
                self._announcing.set(f"last/{self._rank}", _LAST.pack(count, slot.step) + last)
            except RuntimeError:
                self._announcing = None

    def start(self) -> None:
        """Begin to exchange, from a thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop, having told the others how this rank ended."""
        self._closed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_SECONDS)  # a store that does not answer must not keep the process

    def _run(self) -> None:
        while not self._closed.wait(self._pause()):
            if not self._is_lost and self._leads():
                self._attempt(self._exchange)
        if not self._is_lost and all(self._has_left(rank) for rank in self._machines.local if rank < self._rank):
            self._attempt(self._exchange)  # whoever is last sees what all did

    def _attempt(self, work: Callable[[Store], None]) -> None:
        try:
            work(self._connected())
        except RuntimeError:
            # Whoever kept the store is gone, and with it the way to the others. What was heard stays on the board.
            self._is_lost = True

    def _connected(self) -> Store:
        if self._store is None:
            self._store = self._connect()
        return self._store

    def _leads(self) -> bool:
        """Whether this is the first rank of its machine that still can."""
        first = next((rank for rank in self._machines.local if not self._has_left(rank)), None)
        return first == self._rank

    def _has_left(self, rank: int) -> bool:
        slot = self._board.slots[rank]
        return slot.has_ended or not slot.is_alive

    def _in_trouble(self) -> bool:
        local = [self._board.slots[rank] for rank in self._machines.local]
        return any(slot.wants_all or slot.has_ended or slot.seconds_still > _STILL_SECONDS for slot in local)

    def _pause(self) -> float:
        return _TROUBLE_SECONDS if self._in_trouble() else _REST_SECONDS

    def _exchange(self, store: Store) -> None:
        self._publish(store)
        wanted = self._machines.others if self._in_trouble() else self._machines.near
        for machine, data in zip(wanted, store.multi_get([str(machine) for machine in wanted]), strict=True):
            self._take_over(machine, data)
        if self._announcing is not None and self._in_trouble():
            ranks = [rank for machine in wanted for rank in self._machines.ranks[machine]]
            for rank, data in zip(ranks, store.multi_get([f"last/{rank}" for rank in ranks]), strict=True):
                count, step = _LAST.unpack_from(data)
                slot = self._board.slots[rank]
                if (count, step) > (slot.count, slot.step):
                    slot.become_copy(count=count, step=step, last=data[_LAST.size :])

    def _publish(self, store: Store) -> None:
        slots = self._board.slots
        asks = [
            (rank, slots[rank].times_asked)
            for machine in self._machines.others
            for rank in self._machines.ranks[machine]
            if slots[rank].times_asked
        ]
        parts = [_START.pack(time.monotonic_ns(), len(asks)), *(_ASK.pack(*ask) for ask in asks)]
        parts += [_describe(slots[rank]) for rank in self._machines.local]
        # Steps repeat, and so do ranks: what is sent is a few hundred bytes.
        store.set(str(self._machines.own), zlib.compress(b"".join(parts), 1))

    def _take_over(self, machine: int, data: bytes) -> None:
        message = zlib.decompress(data)
        stamp, num_asks = _START.unpack_from(message)
        if self._stamps.get(machine) == stamp:
            return
        self._stamps[machine] = stamp
        at = _START.size
        for _ in range(num_asks):
            self._ask(machine, *_ASK.unpack_from(message, at))
            at += _ASK.size
        for rank in self._machines.ranks[machine]:
            at = _show(self._board.slots[rank], message, at)

    def _ask(self, machine: int, rank: int, times: int) -> None:
        """Hand on a question to a rank of this machine."""
        if rank in self._machines.local and times > self._asked.get((machine, rank), 0):
            self._asked[machine, rank] = times
            self._board.slots[rank].ask()


def _describe(slot: Slot) -> bytes:
    # After the flags the rest is final. A rank that moves is alive; to ask the system costs more.
    flags = slot.has_ended, slot.seconds_still > _GONE_SECONDS and not slot.is_alive, slot.verdict is not None
    count, times_said = slot.count, slot.times_said
    events = slot.events(max(count - HISTORY, 0), count)
    text = slot.said.encode()
    still = int(max(slot.seconds_still, 0) * 1e6)
    return _SLOT.pack(count, slot.step, still, times_said, *flags, len(events), len(text)) + events + text


def _show(slot: Slot, message: bytes, at: int) -> int:
    """Copy one rank's part of a message to its slot; returns where the next part begins."""
    count, step, still, said, has_ended, is_gone, concluded, num_events, num_text = _SLOT.unpack_from(message, at)
    events_at = at + _SLOT.size
    text_at = events_at + num_events
    if said != slot.times_said:
        slot.say(message[text_at : text_at + num_text].decode(errors="replace"), times=said)
    slot.touch(seconds_ago=still / 1e6)
    if (count, step) > (slot.count, slot.step):
        slot.become_copy(count=count, step=step, last=message[events_at:text_at])
    slot.note_state(has_ended=bool(has_ended), is_gone=bool(is_gone), has_concluded=bool(concluded))
    return text_at + num_text


def open_boards(mesh: DeviceMesh, machine: str | None) -> tuple[Board, Machines, Mirror | None, int]:
    """Open the board of this machine, and the way to the boards of others.

    Args:
        mesh: The ranks that take part.
        machine: The name of this machine; ranks of the same name share memory. Default: found out.

    Returns:
        The board, who is where, what copies the slots of other machines, and this rank's place.

    Raises:
        ShardError: A rank cannot open the board that the first rank of its machine made.

    Ranks:
        Collective over the mesh.
    """
    members = mesh.mesh.flatten().tolist()
    rank = members.index(dist.get_rank())
    names = gather_from(mesh, machine or machine_name())
    machines = group_by_machine(names, rank)
    is_first = rank == machines.local[0]
    paths = gather_from(mesh, create_board(len(members)) if is_first else None)
    board, problem = _try_to_open(paths[machines.local[0]], len(members))
    problems = gather_from(mesh, problem)
    if is_first:
        paths[rank].unlink()
    _raise_if_any(problems)
    assert board is not None
    board.slots[rank].open()
    return board, machines, _open_mirror(mesh, board, machines, rank), rank


def _open_mirror(mesh: DeviceMesh, board: Board, machines: Machines, rank: int) -> Mirror | None:
    if len(machines.ranks) == 1:
        return None
    token = gather_from(mesh, uuid.uuid4().hex)[0]
    connect: Callable[[], Any] = compat.store_connector(f"shardwise-guard/{token}")
    mirror = Mirror(board, machines, rank, connect, announces=mesh.device_type == "cpu")
    if rank == machines.local[0]:
        mirror.publish_first()
    gather_from(mesh, None)  # every machine can be read
    return mirror


def _try_to_open(path: Path, num_ranks: int) -> tuple[Board | None, str | None]:
    try:
        return open_board(path, num_ranks), None
    except OSError as error:
        return None, str(error)


def _raise_if_any(problems: Sequence[str | None]) -> None:
    failed = [rank for rank, problem in enumerate(problems) if problem is not None]
    if failed:
        raise ShardError(
            f"rank {failed[0]} cannot open the board of its machine: {problems[failed[0]]}",
            where="guard(model)",
            why="ranks of one machine share a file in memory; containers of one host may have memory of their own",
            fix="guard(model, machine=...) with another name in each container",
        )


def gather_from(mesh: DeviceMesh, value: Any) -> list[Any]:
    """What each rank of the mesh brings, in the mesh's order; also waits for everybody.

    Ranks:
        Collective over the mesh.
    """
    if dist.get_backend() == "fake":
        return [value] * mesh.size()  # rank 0 of a world that is not there: benchmarks and estimates
    gathered: list[Any] = [value]
    for axis in reversed(range(mesh.ndim)):
        parts: list[Any] = [None] * mesh.size(axis)
        dist.all_gather_object(parts, gathered, group=mesh.get_group(axis))
        gathered = [item for part in parts for item in part]
    return gathered
