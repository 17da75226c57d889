"""Traces of ranks on other machines, exchanged through the store."""

from __future__ import annotations

import os
import socket
import threading
import uuid
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise import compat
from shardwise.diagnosing.collective_trace import RankTrace, create_shared_trace, open_shared_trace, shared_folder
from shardwise.distributed.agreement import gather_over_mesh
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
    parts = [socket.gethostname(), str(os.stat(shared_folder()).st_dev)]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)


_STILL_SECONDS = 1.0


class StoreExchange:
    """Traces between machines: each rank writes its own to the store, and one rank of a machine reads the others'.

    Args:
        traces: The traces of all ranks, in the shared memory of this machine.
        machines: Which ranks are on which machine.
        rank: This process.
        store: A connection that nothing else uses.
    """

    def __init__(self, traces: Sequence[RankTrace], machines: Machines, rank: int, store: dist.Store) -> None:
        self._traces, self._machines, self._rank = traces, machines, rank
        self._store: dist.Store | None = store
        self._lock = threading.Lock()
        self._received: dict[int, bytes] = {}

    @property
    def in_trouble(self) -> bool:
        """Whether a rank of this machine stands still or has left, so that all machines are of interest."""
        local = [self._traces[rank] for rank in self._machines.local]
        return any(trace.wants_all or trace.has_ended or trace.seconds_still > _STILL_SECONDS for trace in local)

    def publish(self) -> None:
        """Write this rank's trace to the store."""
        self._attempt(lambda store: self._publish(store, self._rank))

    def exchange(self, *, with_all: bool = False) -> None:
        """Publish this rank's trace; on the first rank of a machine that can, also read those of other machines.

        Args:
            with_all: Read the traces of all machines; otherwise of those next to this one, unless in trouble.
        """
        self._attempt(lambda store: self._exchange(store, with_all or self.in_trouble))

    def _attempt(self, work: Callable[[dist.Store], None]) -> None:
        with self._lock:  # the training thread publishes too
            if self._store is not None:
                try:
                    work(self._store)
                except RuntimeError:
                    self._store = None  # the process that kept the store is gone; what was received stays

    def _publish(self, store: dist.Store, rank: int) -> None:
        store.set(str(rank), zlib.compress(self._traces[rank].to_bytes(), 1))  # pyrefly: ignore[bad-argument-type]

    def _exchange(self, store: dist.Store, with_all: bool) -> None:
        self._publish(store, self._rank)
        local = self._machines.local
        if not all(self._traces[rank].has_left for rank in local if rank < self._rank):
            return  # another rank of this machine reads
        for rank in local:
            if not self._traces[rank].is_alive:
                self._publish(store, rank)  # which cannot do so any more
        wanted = self._machines.others if with_all else self._machines.near
        ranks = [rank for machine in wanted for rank in self._machines.ranks[machine]]
        for rank, message in zip(ranks, store.multi_get([str(rank) for rank in ranks]), strict=True):
            if self._received.get(rank) != message:
                self._received[rank] = message
                self._traces[rank].copy_from(zlib.decompress(message))


def open_traces(mesh: DeviceMesh, machine: str | None) -> tuple[list[RankTrace], Machines, StoreExchange | None, int]:
    """Open the shared memory of this machine, and the way to the traces of other machines.

    Args:
        mesh: The ranks that take part.
        machine: The name of this machine; ranks of the same name share memory. Default: detected.

    Returns:
        The traces, the machines, the exchange between machines if there are several, and this rank's index.

    Raises:
        ShardError: A rank cannot open the file that the first rank of its machine made.

    Ranks:
        Collective over the mesh.
    """
    members = mesh.mesh.flatten().tolist()
    rank = members.index(dist.get_rank())
    machines = group_by_machine(gather_over_mesh(mesh, machine or machine_name()), rank)
    is_first = rank == machines.local[0]
    own_path = create_shared_trace(len(members)) if is_first else None
    path = gather_over_mesh(mesh, own_path)[machines.local[0]]
    assert path is not None
    traces, problem = [], None
    try:
        traces = open_shared_trace(path, len(members))
    except OSError as error:
        problem = str(error)
    failed = [(rank, text) for rank, text in enumerate(gather_over_mesh(mesh, problem)) if text is not None]
    if own_path is not None:
        own_path.unlink()
    if failed:
        raise ShardError(
            f"rank {failed[0][0]} cannot open the shared trace of its machine: {failed[0][1]}",
            where="guard(model)",
            why="ranks of one machine share a file in memory; containers of one host may have memory of their own",
            fix="guard(model, machine=...) with another name in each container",
        )
    traces[rank].open()
    exchange = None
    if len(machines.ranks) > 1:
        token = gather_over_mesh(mesh, uuid.uuid4().hex)[0]
        exchange = StoreExchange(traces, machines, rank, compat.store_connector(f"shardwise-guard/{token}")())
        exchange.publish()
        gather_over_mesh(mesh, None)  # every rank's trace can be read
        exchange.exchange(with_all=True)
    gather_over_mesh(mesh, None)  # and has been, by the first rank of each machine
    return traces, machines, exchange, rank
