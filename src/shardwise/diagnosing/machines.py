"""Which ranks share memory: the machines of a run, and where this process is among them. No torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.diagnosing.board import board_folder


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
