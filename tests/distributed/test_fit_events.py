"""What happens when in a run: records, evaluations, checkpoints and the export, by the numbers in its settings."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.config.run import CheckpointConfig, MetricsConfig, ScheduleConfig
from shardwise.training.loop import fit
from shardwise.training.metrics import read_records
from tests.distributed.fit_runs import Recorder, changed, tiny
from tests.ranks import ranks


@ranks(2)
def test_records_evaluations_and_checkpoints_come_when_they_are_due(rank: int, tmp_path: Path):
    recorder = Recorder()
    config = replace(
        changed(tiny(tmp_path, steps=7, evaluate_every=3, evaluation_batches=1), data={"evaluation_fraction": 0.1}),
        metrics=MetricsConfig(every=3),
        checkpoint=CheckpointConfig(every=2, keep_last=2, export=True),
        schedule=ScheduleConfig(name="linear", warmup_steps=1, final_ratio=0.4),
    )
    training = fit(config, progress=recorder)
    folder = tmp_path / "run"
    records = read_records(folder / "metrics.jsonl")
    assert [(r["step"], "loss" in r) for r in records] == [
        (3, True),
        (3, False),
        (6, True),
        (6, False),
        (7, True),
        (7, False),
    ]
    assert all("evaluation_loss" in r for r in records if "loss" not in r)
    rates = {r["step"]: r["learning_rate"] for r in records if "loss" in r}
    assert rates == pytest.approx({3: 1e-2 * (1 - 0.6 / 5), 6: 1e-2 * (1 - 0.6 * 4 / 5), 7: 1e-2 * 0.4})
    assert [r["tokens"] for r in records if "loss" in r] == [64, 64, 64]
    assert all(r["tokens_per_s"] > 0 and r["memory_bytes"] > 1 << 20 for r in records if "loss" in r)
    assert training.evaluation_loss == records[-1]["evaluation_loss"]
    assert sorted(os.listdir(folder / "checkpoints")) == ["step-00000006", "step-00000007"]
    assert training.checkpoint == str(folder / "checkpoints" / "step-00000007")
    assert training.exported == str(folder / "export")
    assert "model.safetensors" in os.listdir(folder / "export")
    assert (training.steps, training.total_steps, training.tokens, training.num_ranks) == (7, 7, 7 * 64, 2)
    assert (training.bad_steps, training.resumed_step, training.sample, training.stopped) == (0, 0, None, None)
    assert recorder.events == [("start", 7, "training tutorial"), *[("advance", 1)] * 7, ("finish",)]
    if rank == 0:
        assert json.loads((folder / "checkpoints" / "step-00000007" / "manifest.json").read_text())


@ranks(2)
def test_a_run_that_goes_on_counts_from_where_it_was(rank: int, tmp_path: Path):
    config = replace(tiny(tmp_path, steps=2), checkpoint=CheckpointConfig(every=1, keep_last=None))
    fit(config)
    recorder = Recorder()
    later = fit(changed(config, training={"steps": 5}), progress=recorder)
    assert (later.resumed_step, later.steps, later.total_steps, later.tokens) == (2, 5, 5, 3 * 64)
    assert list(later.read_losses()) == [1, 2, 3, 4, 5]
    assert [number for kind, *number in recorder.events if kind == "advance"][-3:] == [[1]] * 3
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == [f"step-{step:08d}" for step in range(1, 6)]
    assert later.resume_command.endswith("--set training.steps=10")
