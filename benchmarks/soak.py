"""A long run of a tiny model: does a step cost more, in time or memory, the longer the run is?"""

import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import on_ranks
from benchmarks.reporting import Result
from shardwise.config.run import CheckpointConfig, DataConfig, RunConfig, TrainingConfig
from shardwise.distributed.mesh import shutdown
from shardwise.training.loop import fit

TIME_GOAL, MEMORY_GOAL = 1.05, 1.02
_OPTIONS = {"width": 16, "num_layers": 1, "num_heads": 2, "max_sequence_length": 16}
_NUM_WINDOWS = 10


@dataclass
class Watching:
    """A progress that notes, at the end of each window, how long its steps took and what memory is held."""

    window: int
    step_s: list[float] = field(default_factory=list)
    """Median of the window's steps."""
    cpu_s: list[float] = field(default_factory=list)
    """CPU time of the window's steps, each: without what other programs take."""
    memory: list[int] = field(default_factory=list)
    _times: list[float] = field(default_factory=list)
    _last: float = 0.0
    _last_cpu: float = 0.0

    def start(self, total: int, label: str) -> None:
        self._last, self._last_cpu = time.perf_counter(), time.process_time()

    def advance(self, steps: int = 1, note: str = "") -> None:
        now = time.perf_counter()
        self._times.append(now - self._last)
        self._last = now
        if len(self._times) == self.window:
            self.step_s.append(statistics.median(self._times))
            self.memory.append(_resident_bytes())
            cpu = time.process_time()
            self.cpu_s.append((cpu - self._last_cpu) / self.window)
            self._last_cpu = cpu
            self._times.clear()

    def finish(self, note: str = "") -> None:
        pass


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def watch(num_steps: int, folder: Path) -> Watching:
    """Run it on this rank, in ten windows.

    Ranks:
        Collective.
    """
    config = RunConfig(
        model="tutorial",
        model_options=_OPTIONS,
        data=DataConfig(source="python", sequence_length=16),
        training=TrainingConfig(steps=num_steps, batch_size=4, sample=None),
        checkpoint=CheckpointConfig(every=max(1, num_steps // 20)),
        folder=str(folder / "run"),
    )
    watching = Watching(window=max(1, num_steps // _NUM_WINDOWS))
    fit(config, progress=watching)
    shutdown()
    return watching


def soak_results(num_steps: int, num_ranks: int) -> list[Result]:
    """Rows that compare the last tenth of the run with its second one; the first warms up."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        seen = on_ranks("benchmarks.soak:watch", num_ranks, num_steps, Path(folder))[0]
    name = f"train/soak of {num_steps:,} steps/{num_ranks} rank{'s' if num_ranks > 1 else ''}"
    rows = []
    for what, times in (("step", seen.step_s), ("CPU time of a step", seen.cpu_s)):
        details = {"by_tenth_ms": [round(seconds * 1e3, 4) for seconds in times]}
        case = f"{name}: {what} in the last tenth against the second"
        rows.append(_row(case, times[-1] * 1e3, times[1] * 1e3, "ms", TIME_GOAL, details))
    case = f"{name}: memory after the last tenth against the second"
    rows.append(_row(case, seen.memory[-1], seen.memory[1], "B", MEMORY_GOAL, {"by_tenth_bytes": seen.memory}))
    return rows


def _row(case: str, value: float, baseline: float, unit: str, goal: float, details: dict[str, object]) -> Result:
    ratio = value / baseline
    return Result(
        case=case,
        value=value,
        unit=unit,
        baseline=baseline,
        ratio=ratio,
        goal=f"<= {goal}",
        met=ratio <= goal,
        details=details,
    )
