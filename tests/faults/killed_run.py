"""Runs that save without end, to be killed at any moment, and the proof that what they committed can be loaded.

Every tensor of a checkpoint holds its step and nothing else, so that a torn one gives itself away.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.checkpointing import background_writer
from shardwise.checkpointing.formats.sharded import committed_steps, sweep
from shardwise.checkpointing.manager import Checkpointer
from tests.by_hand import mesh_1d, shard_module
from tests.faults.kill_points import kill_at
from tests.ranks import start_fork_server

_WIDTH = 160


@dataclass(frozen=True)
class Kind:
    """What kind of run."""

    num_ranks: int = 1
    asynchronous: bool = False
    point: str = ""
    """Die when this point of a save is reached."""
    strikes_rank: int = 0
    safe_saves: int = 2
    """So many saves come before."""


class Running:
    """The ranks of a run, as processes of their own."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        context = multiprocessing.get_context("forkserver")
        start_fork_server()
        store = folder.with_name(f"{folder.name}-store-{time.monotonic_ns()}")
        self._heard: list[int] = []
        self.processes = []
        for rank in range(kind.num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_train, args=(folder, kind, rank, store, theirs))
            process.start()
            theirs.close()
            self.processes.append(process)
            if rank == 0:
                self._connection = ours
            else:
                ours.close()

    def wait_for_save(self, timeout_s: float = 180.0) -> None:
        """Until the first checkpoint of this run is committed."""
        assert self._connection.poll(timeout_s), "the run did not save anything"
        self._heard.append(self._connection.recv())

    def kill(self, ranks: list[int] | None = None) -> None:
        """SIGKILL, then the others too."""
        for rank in ranks or range(len(self.processes)):
            self.processes[rank].kill()
        self.end()

    def end(self, timeout_s: float = 0.0) -> None:
        """Wait for the ranks to die by themselves, then make them."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            process.kill()
            process.join()

    def last_committed(self) -> int:
        """The last step that the run itself was told is committed; -1 when none."""
        with contextlib.suppress(EOFError, OSError):
            while self._connection.poll(0.05):
                self._heard.append(self._connection.recv())
        self._connection.close()
        return max(self._heard, default=-1)


def make_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(6)))


def assert_intact(folder: Path, at_least: int) -> int:
    """Load what is there as anybody would, and see that it is whole. Return its step, or -1."""
    steps = committed_steps(folder)
    if not steps:
        assert at_least == -1, f"step {at_least} was committed and is gone"
        return -1
    for step in steps:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with Checkpointer(folder, rng=False, asynchronous=False) as checkpointer:
            assert checkpointer.load(model=model, optimizers=optimizer, step=step) == step
            assert checkpointer.extra == {"step": step}
        for parameter in model.parameters():
            assert (parameter == step).all()
            assert (optimizer.state[parameter]["momentum_buffer"] == step).all()
    assert steps[-1] >= at_least, f"step {at_least} was committed, the latest is {steps[-1]}"
    return steps[-1]


def assert_swept(folder: Path) -> None:
    """What was left half done can be removed, and nothing else is."""
    steps = committed_steps(folder)
    sweep(folder)
    assert sorted(os.listdir(folder)) == [f"step-{step:08d}" for step in steps]


def _train(folder: Path, kind: Kind, rank: int, store: Path, connection: Connection) -> None:
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    mesh = None
    if kind.num_ranks > 1:
        shared = dist.FileStore(str(store), kind.num_ranks)
        dist.init_process_group(
            "gloo", store=shared, rank=rank, world_size=kind.num_ranks, timeout=timedelta(seconds=180)
        )
        mesh = mesh_1d(kind.num_ranks)
    model = make_model()
    if mesh is not None:
        shard_module(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with contextlib.suppress(BrokenPipeError):
        _save_for_ever(folder, kind, model, optimizer, rank, connection)


def _save_for_ever(
    folder: Path, kind: Kind, model: nn.Module, optimizer: Any, rank: int, connection: Connection
) -> None:
    signal = folder.with_name(f"{folder.name}-strike")
    strikes = bool(kind.point) and rank == kind.strikes_rank
    in_writer = kind.asynchronous and kind.point not in ("folder-made", "retired", "removed")
    if strikes and in_writer:
        _arm_writer(kind, signal)
    checkpointer = Checkpointer(folder, keep_last=2, asynchronous=kind.asynchronous, rng=False)
    latest = checkpointer.latest()
    first = 0 if latest is None else latest + 1
    for step in range(first, first + 10_000):
        if strikes and step == first + kind.safe_saves:
            checkpointer.wait()
            signal.touch()
            if not in_writer:
                kill_at(kind.point)
        _fill(model, optimizer, step)
        checkpointer.save(step, model=model, optimizers=optimizer, extra={"step": step})
        _tell(connection, rank, step - 1, if_=kind.asynchronous and step > first)
        _tell(connection, rank, step, if_=not kind.asynchronous)


def _tell(connection: Connection, rank: int, step: int, *, if_: bool) -> None:
    # `save` waits for the one before it, so that one is committed when it returns.
    if if_ and rank == 0:
        connection.send(step)


def _arm_writer(kind: Kind, signal: Path) -> None:
    """Let the process that writes watch for the point from its start, and strike once the file `signal` is there."""
    watching = (
        "import os; from tests.faults.kill_points import kill_at; "
        f"kill_at({kind.point!r}, when=lambda: os.path.exists({str(signal)!r}), with_parent=True); "
    )
    background_writer._PROGRAM = background_writer._PROGRAM.replace("main(int", watching + "main(int")  # pyrefly: ignore[bad-assignment]


@torch.no_grad()
def _fill(model: nn.Module, optimizer: Any, step: int) -> None:
    for parameter in model.parameters():
        parameter.fill_(step)
        optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter)).fill_(step)


Killer = Callable[[Running], None]
