"""Process-wide settings of a run: seeds and determinism, garbage collection, the profiler."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile

from shardwise.config.run import MetricsConfig


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """What exists now is not looked at again until the block ends; what is made inside is collected as ever.

    A full collection takes longer than a short step, and each rank makes the others wait for its own.

    Ranks:
        Local.
    """
    gc.collect(1)  # what is young; a look at everything would hold up the first step by a tenth of a second
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Profile:
    """Records the steps that the config names, and writes `profile/rank0.json`, which Perfetto and Chrome open.

    Outside of that window it costs a comparison a step.

    Args:
        config: Which steps.
        folder: Of the run.
        rank: Of this process; only rank 0 records.
        steps_done: Where the run goes on.

    Ranks:
        Local.
    """

    def __init__(self, config: MetricsConfig, folder: str | Path, *, rank: int = 0, steps_done: int = 0) -> None:
        self.path = Path(folder) / "profile" / f"rank{rank}.json"
        self._steps_done = steps_done
        first = config.profile_step if rank == 0 else None
        self._window = range(0) if first is None else range(first, first + max(1, config.profile_steps))
        self._profiler: profile | None = None

    def __enter__(self) -> Profile:
        self._move()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def step(self) -> None:
        """A step is done. Call it after each."""
        self._steps_done += 1
        self._move()

    def _move(self) -> None:
        """Start before the first step of the window, stop after its last."""
        is_inside = self._steps_done + 1 in self._window
        if is_inside and self._profiler is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities)
            self._profiler.start()
        elif not is_inside:
            self._stop()

    def _stop(self) -> None:
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.path))


_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def seed_for(seed: int, *purpose: object) -> int:
    """A seed below 2**63 for one purpose, as in `seed_for(0, "dropout", rank, step)`; others have nothing in common.

    Ranks:
        Local: ranks that name the same purpose get the same seed.
    """
    text = repr((int(seed), *purpose)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def seed_step(seed: int, rank: int, step: int) -> None:
    """Seed torch's, Python's and NumPy's random numbers for one step on one rank.

    What a step draws (dropout, mostly) depends on the run's seed, the rank and the step alone: a resumed run draws the
    same, from whatever format it was loaded.

    Args:
        seed: The run's.
        rank: Among data-parallel ranks; those that share a layer's matrices must drop the same.
        step: From 0.

    Ranks:
        Local.
    """
    number = seed_for(seed, "step", rank, step)
    torch.default_generator.manual_seed(number)  # torch.manual_seed asks for every kind of device, each time
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)
    elif torch.accelerator.is_available():
        torch.manual_seed(number)
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number % 2**32)


@contextmanager
def same_bits(wanted: bool) -> Iterator[None]:
    """Allow only kernels that give the same bits every time, until the block ends.

    Args:
        wanted: False changes nothing.

    Ranks:
        Local.
    """
    if not wanted:
        yield
        return
    had, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    # CUDA's matrix products need a workspace of fixed size; it must not have made any yet.
    sets_workspace = torch.cuda.is_available() and _WORKSPACE not in os.environ
    if sets_workspace:
        os.environ[_WORKSPACE] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(had, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        if sets_workspace:
            os.environ.pop(_WORKSPACE, None)
