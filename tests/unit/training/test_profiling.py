"""The window of steps that is profiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardwise.config.run import MetricsConfig
from shardwise.training.loop import Profile


def run(profile: Profile, num_steps: int, first: int = 1) -> None:
    with profile:
        for step in range(first, first + num_steps):
            with torch.profiler.record_function(f"step {step}"):
                torch.ones(3).sum()
            profile.step()


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
    profile = Profile(MetricsConfig(profile_step=first, profile_steps=count), tmp_path, steps_done=steps_done)
    run(profile, num_steps, steps_done + 1)
    assert {name for name in seen(profile.path) if name.startswith("step ")} == expected


@pytest.mark.parametrize(
    ("config", "rank", "steps_done"),
    [
        (MetricsConfig(), 0, 0),
        (MetricsConfig(profile_step=1), 1, 0),
        (MetricsConfig(profile_step=1, profile_steps=2), 0, 7),
    ],
)
def test_nothing_outside_of_it(tmp_path: Path, config: MetricsConfig, rank: int, steps_done: int):
    run(Profile(config, tmp_path, rank=rank, steps_done=steps_done), 3)
    assert list(tmp_path.iterdir()) == []
