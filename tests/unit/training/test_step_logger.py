"""What a run says of its steps: records with rates since the last one, and a line beside the bar."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.config.run import MetricsConfig, RunConfig, TrainingConfig
from shardwise.distributed.mesh import init_distributed, shutdown
from shardwise.progress import NoProgress
from shardwise.training.metrics import Metrics, StepLogger, StepReading, read_records

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    init_distributed()
    yield
    shutdown()


class Notes(NoProgress):
    def __init__(self) -> None:
        self.heard: list[tuple[int, str]] = []

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.heard.append((steps, note))


def told(folder: Path, *, every: int = 1, num_steps: int = 5) -> tuple[StepLogger, Notes, Metrics]:
    metrics = Metrics(folder, MetricsConfig(every=every, peak_flops=1e6), 0)
    notes = Notes()
    config = RunConfig(training=TrainingConfig(steps=num_steps))
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 4, bias=False))  # 240 operations a token
    return StepLogger(model, metrics, notes, config=config, device=CPU), notes, metrics


def reading(step: int, tokens: int, seconds: float, loss: float = 2.0, **others: float) -> StepReading:
    return StepReading(step=step, loss=loss, grad_norm=0.5, tokens=tokens, seconds=seconds, others=others)


def test_a_record_holds_the_rate_since_the_one_before(tmp_path: Path):
    logger, _, metrics = told(tmp_path, every=2)
    logger.log([reading(1, 100, 1.0, 4.0), reading(2, 300, 3.0, 3.0, learning_rate=0.1, data_wait_s=0.25)])
    logger.log([reading(3, 50, 1.0), reading(4, 70, 2.0), reading(5, 90, 3.0, 1.5)])
    metrics.close()
    records = {record["step"]: record for record in read_records(tmp_path / "metrics.jsonl")}
    assert {step: (record["tokens"], record["tokens_per_s"]) for step, record in records.items()} == {
        2: (300, 100.0),
        4: (70, 40.0),
        5: (90, 30.0),  # the last step always has one
    }
    assert (records[2]["loss"], records[2]["grad_norm"]) == (3.0, 0.5)
    assert (records[2]["learning_rate"], records[2]["data_wait_s"]) == (0.1, 0.25)
    assert (records[4]["learning_rate"], "data_wait_s" in records[4]) == (None, False)
    assert records[2]["mfu"] == pytest.approx(100.0 * 240 / 1e6)
    assert records[5]["memory_bytes"] > 1e6
    assert (logger.first_loss, logger.last_loss, logger.tokens, logger.seconds) == (4.0, 1.5, 610, 10.0)


def test_the_line_beside_the_bar(tmp_path: Path):
    logger, notes, metrics = told(tmp_path, num_steps=100)
    # The first step is slow and forgotten; the second sets the pace; later ones move it by a tenth.
    logger.log([reading(1, 1000, 60.0), reading(2, 1000, 1.0), reading(3, 1000, 11.0), reading(100, 1000, 2.0)])
    metrics.close()
    lines = [note for _, note in notes.heard]
    assert [line.split("  ")[0] for line in lines] == ["loss 2.000"] * 4
    assert [line.split("  ")[1] for line in lines][1:3] == ["1k tokens/s", "500 tokens/s"]
    assert [line.split("  ")[3] for line in lines][1:] == ["1 min 38 s left", "3 min 14 s left", "0 s left"]
    assert all(line.split("  ")[2].endswith("iB") for line in lines)


def test_a_step_without_a_duration_has_no_rate(tmp_path: Path):
    logger, notes, metrics = told(tmp_path)
    logger.log([reading(1, 10, 0.0)])
    metrics.close()
    (record,) = read_records(tmp_path / "metrics.jsonl")
    assert record["tokens_per_s"] == 0.0
    assert "  ? tokens/s  " in notes.heard[0][1]


def test_an_evaluation_and_a_way_back(tmp_path: Path):
    logger, notes, metrics = told(tmp_path)
    logger.log([reading(1, 10, 1.0), reading(2, 10, 1.0), reading(3, 10, 1.0)])
    logger.log_evaluation(3, 1.25)
    logger.rewind(3, 1)
    assert notes.heard[-1] == (-2, "back to step 1")
    logger.log([reading(4, 10, 1.0)])
    metrics.close()
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 4]
