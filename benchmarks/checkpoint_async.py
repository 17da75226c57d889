"""What a save in the background costs the training that continues: time in which it is held up, and slower steps."""

import gc
import importlib
import itertools
import math
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from benchmarks.checkpoint_state import SIZES, build_model, remove
from benchmarks.processes import join
from shardwise.checkpointing.manager import Checkpointer
from shardwise.models.load import load_model
from shardwise.sharding.apply import shard

MODES = ("dcp thread", "dcp process", "torch_checkpointing")
_MAX_PLAIN_STEPS = 100
_MARGIN = 1.5  # saves come at intervals this many times as long as a save takes


@dataclass(frozen=True)
class Setup:
    """One set of ranks."""

    num_ranks: int
    device: str
    size: str
    folder: Path
    num_saves: int
    model: str = ""
    """A reference model; empty: feed-forward blocks."""
    modes: tuple[str, ...] = MODES


@dataclass(frozen=True)
class Measured:
    """Seconds, by who saved."""

    blocked_s: dict[str, list[float]] = field(default_factory=dict)
    """Of each save: how long training stood still for it."""
    first_s: dict[str, float] = field(default_factory=dict)
    """The same of the first save, which makes buffers and processes."""
    steps_s: dict[str, list[float]] = field(default_factory=dict)
    """Of each step while saves come at an interval; `none`: without any."""
    commit_s: dict[str, list[float]] = field(default_factory=dict)
    """Of each save after the first: from the call to a checkpoint that can be loaded; a step runs beside it."""
    load_s: dict[str, float] = field(default_factory=dict)
    """Of the newest checkpoint into the same model and optimizer, files in the page cache."""
    numbers: dict[str, float] = field(default_factory=dict)


class Training:
    """A model, an optimizer, and steps in two halves, between which nothing may change the weights."""

    def __init__(self, setup: Setup) -> None:
        self.device = setup.device
        if setup.model:
            torch.manual_seed(0)
            model = load_model(setup.model, device=setup.device)
            self.vocab_size: int = model.config.vocab_size  # pyrefly: ignore[bad-assignment, missing-attribute]
            mesh = init_device_mesh(setup.device, (setup.num_ranks,), mesh_dim_names=("shard",))
            self.model: nn.Module = shard(model, mesh=mesh)
            self.batch = torch.randint(0, self.vocab_size, (4, 2049), device=setup.device)
            fused = setup.device == "cuda"
            self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=fused)
        else:
            self.model = build_model(setup.size, setup.device)
            self.batch = torch.randn(8, SIZES[setup.size].width, device=setup.device)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-9)
        self.is_language = bool(setup.model)

    def forward_backward(self) -> None:
        if self.is_language:
            logits = self.model(self.batch[:, :-1])
            F.cross_entropy(logits.flatten(0, 1).float(), self.batch[:, 1:].flatten()).backward()
        else:
            self.model(self.batch).square().mean().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.forward_backward()
        self.update()

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure(setup: Setup) -> Measured:
    """Saves of every kind on this rank.

    Ranks:
        Collective.
    """
    join(setup.device, setup.num_ranks)
    training = Training(setup)
    for _ in range(3):
        training.step()
    gc.freeze()  # a collection of everything takes as long as a step, whoever saves
    measured = Measured()
    for name in ("ours", *setup.modes):
        _Saves(setup, training, name).measure(measured)
    if measured.steps_s:
        num_steps = min(max(map(len, measured.steps_s.values())), _MAX_PLAIN_STEPS)
        measured.steps_s["none"] = _timed_steps(training, num_steps, lambda number: None)
    dist.destroy_process_group()
    return measured


class _Saves:
    """Saves of one kind."""

    def __init__(self, setup: Setup, training: Training, name: str) -> None:
        self._setup, self._training, self._name = setup, training, name
        self._root = setup.folder / name.replace(" ", "-")
        self._number = 0
        self._pending: Any = None
        self._checkpointer = Checkpointer(self._root, keep_last=1) if name == "ours" else None
        self._manager = torch_checkpointing() if name == "torch_checkpointing" else None
        # On the training's own group the collectives of a save in the background can meet those of a step.
        self._group = None if self._checkpointer else dist.new_group(backend="gloo")

    def measure(self, measured: Measured) -> None:
        blocked, durations = [], []
        for number in range(self._setup.num_saves + 1):
            start = time.perf_counter()
            blocked_s = self._held_up()
            self._finish()
            durations.append(time.perf_counter() - start)
            if number == 0:
                measured.first_s[self._name] = blocked_s
            else:
                blocked.append(blocked_s)
            _tell(f"{self._name}: save {number} held training up for {blocked_s:.2f} s and took {durations[-1]:.1f} s")
        measured.blocked_s[self._name] = blocked
        measured.commit_s[self._name] = durations[1:]
        self._training.optimizer.zero_grad()
        self._training.wait()
        start = time.perf_counter()
        self._load()
        self._training.wait()
        measured.load_s[self._name] = time.perf_counter() - start
        _tell(f"{self._name}: loaded in {measured.load_s[self._name]:.1f} s")
        if self._setup.device == "cuda":  # elsewhere the writer takes its time from the training's own cores
            self._steps(measured, max(durations[1:]))
        for each in (self._checkpointer, self._manager):
            if each is not None:
                each.close()
        remove(self._root)

    def _held_up(self) -> float:
        """Seconds for which a save keeps the training from its work; a step of training runs beside the save."""
        self._training.wait()
        dist.barrier()
        start = time.perf_counter()
        self._start()
        in_call = time.perf_counter() - start
        self._training.forward_backward()
        self._training.wait()
        start = time.perf_counter()
        with nullcontext() if self._manager is None else self._manager.lock():  # and here the user's loop
            pass
        self._training.wait()
        at_gate = time.perf_counter() - start
        self._training.update()
        return in_call + at_gate

    def _steps(self, measured: Measured, duration: float) -> None:
        """Train with a save at every interval, the interval being longer than a save takes."""
        step_s = sum(_timed_steps(self._training, 5, lambda number: None)) / 5
        interval = math.ceil(_MARGIN * duration / step_s) + 1
        slowest = torch.tensor(interval, device=self._setup.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        interval = int(slowest)
        _tell(f"{self._name}: {self._setup.num_saves} x {interval} steps of {step_s:.3f} s")

        def before(number: int) -> None:
            if number % interval == 1:
                self._finish()
                self._start()

        measured.steps_s[self._name] = _timed_steps(self._training, interval * self._setup.num_saves + 1, before)
        measured.numbers[f"{self._name}: steps between saves"] = interval
        self._finish()

    def _start(self) -> None:
        self._number += 1
        training = self._training
        if self._checkpointer is not None:
            self._checkpointer.save(self._number, model=training.model, optimizers=training.optimizer)
            return
        state, path = self._state(), self._root / str(self._number)
        if self._manager is not None:
            self._pending = self._manager.save(str(path), state)
            return
        kind = AsyncCheckpointerType.PROCESS if "process" in self._name else AsyncCheckpointerType.THREAD
        self._pending = dcp.async_save(
            state,
            checkpoint_id=path,
            process_group=self._group,
            async_checkpointer_type=kind,
        )

    def _state(self) -> dict[str, Any]:
        """Of model and optimizer, as torch's functions give it."""
        self._training.optimizer.zero_grad()  # while a gradient exists, torch returns an empty optimizer state
        model_state, optimizer_state = get_state_dict(self._training.model, self._training.optimizer)
        return {"model": model_state, "optim": optimizer_state}

    def _load(self) -> None:
        training, path = self._training, self._root / str(self._number)
        if self._checkpointer is not None:
            self._checkpointer.load(model=training.model, optimizers=training.optimizer)
            return
        state = self._state()
        if self._manager is not None:
            state = self._manager.load(str(path), into=state)
        else:
            dcp.load(state, checkpoint_id=path, process_group=self._group)
        set_state_dict(
            training.model,
            training.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )

    def _finish(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.wait()
        elif self._pending is not None:
            getattr(self._pending, "upload_completion", self._pending).result()
            self._pending = None
            if dist.get_rank() == 0:  # keep one, as we do
                shutil.rmtree(self._root / str(self._number - 1), ignore_errors=True)


def torch_checkpointing() -> Any:
    """Meta's library with its defaults, but for direct I/O: its unaligned writes fail on the disks tried here."""
    manager = importlib.import_module("torch_checkpointing").CheckpointManager
    files = importlib.import_module("torch_checkpointing.storage.filesystem")
    return manager(manager.Config(storage_config=files.LocalFileSystemStorageConfig(use_direct_io=False)))


def _tell(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def _timed_steps(training: Training, count: int, before: Callable[[int], object]) -> list[float]:
    """Seconds of each step, with what comes before it."""
    training.wait()
    if training.device == "cuda":
        return _timed_on_gpu(training, count, before)
    times = []
    for number in range(count):
        start = time.perf_counter()
        before(number)
        training.step()
        times.append(time.perf_counter() - start)
    return times


def _timed_on_gpu(training: Training, count: int, before: Callable[[int], object]) -> list[float]:
    """From the end of one step to the end of the next, by the GPU's clock; Python is a step ahead, as in any loop."""
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    ends[0].record()
    for number in range(count):
        before(number)
        training.step()
        ends[number + 1].record()
        ends[number].synchronize()
    training.wait()
    return [start.elapsed_time(end) / 1e3 for start, end in itertools.pairwise(ends)]
