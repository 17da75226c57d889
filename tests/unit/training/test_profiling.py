"""The window of steps that is profiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardwise.config.run import MetricsConfig
from shardwise.training.loop import profiled


def run(config: MetricsConfig, folder: Path, num_steps: int, *, rank: int = 0, steps_done: int = 0) -> None:
    with profiled(config, folder, rank=rank, steps_done=steps_done) as step_done:
        for step in range(steps_done + 1, steps_done + 1 + num_steps):
            with torch.profiler.record_function(f"step {step}"):
                torch.ones(3).sum()
            step_done()


def seen(path: Path) -> set[str]:
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"] if "step" in event.get("name", "")}


@pytest.mark.parametrize(
    ("first", "count", "steps_done", "num_steps", "expected"),
    [
        (1, 2, 0, 5, {"step 1", "step 2"}),
        (3, 2, 0, 5, {"step 3", "step 4"}),
        (4, 10, 0, 5, {"step 4", "step 5"}),  # the run ends first
        (3, 3, 3, 5, {"step 4", "step 5"}),  # resumed inside the window
    ],
)
def test_window(tmp_path: Path, first: int, count: int, steps_done: int, num_steps: int, expected: set[str]):
    config = MetricsConfig(profile_step=first, profile_steps=count)
    run(config, tmp_path, num_steps, steps_done=steps_done)
    assert {name for name in seen(tmp_path / "profile" / "rank0.json") if name.startswith("step ")} == expected


@pytest.mark.parametrize(
    ("config", "rank", "steps_done"),
    [
        (MetricsConfig(), 0, 0),
        (MetricsConfig(profile_step=1), 1, 0),
        (MetricsConfig(profile_step=1, profile_steps=2), 0, 7),
    ],
)
def test_nothing_outside_of_it(tmp_path: Path, config: MetricsConfig, rank: int, steps_done: int):
    run(config, tmp_path, 3, rank=rank, steps_done=steps_done)
    assert list(tmp_path.iterdir()) == []
