"""What a run says of itself at its end: text, JSON, and the command that continues with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.training.run_folder import Training


def training(**changes: Any) -> Training:
    given: dict[str, Any] = {
        "model": "tutorial", "num_params": 50_400, "num_ranks": 2, "steps": 8, "total_steps": 8, "first_loss": 5.5,
        "last_loss": 2.25, "tokens": 4000, "seconds": 2.0, "folder": "runs/a", "metrics": "runs/a/metrics.jsonl",
    }  # fmt: skip
    return Training(**{**given, **changes})


def test_a_run_that_is_complete():
    assert str(training()).splitlines() == [
        "trained tutorial (50.4k parameters) on 2 ranks: loss 5.500 -> 2.250 in 8 steps, 2 s, 2k tokens/s",
        "metrics     runs/a/metrics.jsonl",
        "train on    shardwise train runs/a/config.yaml --set training.steps=16",
    ]


def test_a_run_that_was_stopped_and_one_that_went_on():
    lines = str(training(stopped="SIGTERM", steps=5, resumed_step=2, num_ranks=1)).splitlines()
    assert lines[0].startswith(
        "stopped (SIGTERM) tutorial (50.4k parameters) on 1 rank: loss 5.500 -> 2.250 in 3 steps"
    )
    assert " in 3 steps from step 2, 2 s, 2k tokens/s" in lines[0]
    assert lines[-1] == "resume      shardwise train runs/a/config.yaml"


def test_everything_that_can_be_said():
    lines = str(
        training(
            evaluation_loss=2.0, bad_steps=3, sample="first\nsecond", checkpoint="runs/a/c", exported="runs/a/export",
        )
    ).splitlines()  # fmt: skip
    assert lines[1:-1] == [
        "evaluation loss 2.000",
        "left out 3 steps whose loss or gradient was not finite",
        "",
        "sample",
        "    first",
        "    second",
        "",
        "checkpoint  runs/a/c",
        "weights     runs/a/export",
        "metrics     runs/a/metrics.jsonl",
    ]


@pytest.mark.parametrize("which", ["first_loss", "last_loss"])
def test_nothing_was_left_to_do(which: str):
    first = str(training(**{which: None})).splitlines()[0]
    assert first == "trained tutorial (50.4k parameters) on 2 ranks: 8 steps were done already"


def test_no_time_at_all_divides_nothing_by_zero():
    assert "tokens/s" in str(training(seconds=0.0))


@pytest.mark.parametrize(("steps", "more"), [(7, ""), (8, " --set training.steps=16"), (9, " --set training.steps=16")])
def test_the_command_that_goes_on(steps: int, more: str):
    assert training(steps=steps).resume_command == f"shardwise train runs/a/config.yaml{more}"


def test_losses_are_read_from_the_metrics(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"step": 1, "loss": 2.5},
        {"step": 1, "evaluation_loss": 9.0},
        {"step": 2, "loss": "nan"},
        {"step": 3, "loss": 1},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = training(metrics=str(path)).read_losses()
    assert list(found) == [1, 2, 3]
    assert (found[1], found[3]) == (2.5, 1.0)
    assert found[2] != found[2]


def test_json():
    found = json.loads(json.dumps(training(checkpoint="c").to_dict()))
    assert found == {
        "model": "tutorial", "num_params": 50400, "num_ranks": 2, "steps": 8, "total_steps": 8, "resumed_step": 0,
        "first_loss": 5.5, "last_loss": 2.25, "evaluation_loss": None, "bad_steps": 0, "tokens": 4000, "seconds": 2.0,
        "folder": "runs/a", "metrics": "runs/a/metrics.jsonl", "checkpoint": "c", "sample": None, "exported": None,
        "stopped": None, "resume_command": "shardwise train runs/a/config.yaml --set training.steps=16",
    }  # fmt: skip
