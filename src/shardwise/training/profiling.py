"""A torch profile of a few steps of a run, on request."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile

from shardwise.config.run import MetricsConfig


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
