"""Metrics on disk: what is written, what a resume keeps, what a killed run leaves; trackers that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.config.run import MetricsConfig
from shardwise.errors import ConfigError, EnvironmentProblem
from shardwise.training.metrics import Metrics, read_records


def steps(folder: Path) -> list[int]:
    return [record["step"] for record in read_records(folder / "metrics.jsonl")]


def test_records_are_lines_of_plain_json(tmp_path: Path):
    metrics = Metrics(tmp_path / "run", MetricsConfig(), 0)
    metrics.record(1, loss=torch.tensor(2.5), grad_norm=float("nan"), tokens=torch.tensor(7), mfu=None, note="hi")
    line = (tmp_path / "run" / "metrics.jsonl").read_text()  # before it is closed
    assert line.endswith("\n")

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    record = json.loads(line, parse_constant=refuse)
    assert record.pop("time") > 1.7e9
    assert record == {"step": 1, "loss": 2.5, "grad_norm": "nan", "tokens": 7, "mfu": None, "note": "hi"}
    metrics.close()
    metrics.close()


def test_other_ranks_write_nothing(tmp_path: Path):
    metrics = Metrics(tmp_path, MetricsConfig(tensorboard=True), 3)
    metrics.record(1, loss=1.0)
    metrics.rewind(0)
    metrics.close()
    assert list(tmp_path.iterdir()) == []


def test_a_resume_drops_what_was_not_saved_and_half_a_line(tmp_path: Path):
    first = Metrics(tmp_path, MetricsConfig(), 0)
    for step in range(1, 8):
        first.record(step, loss=1.0)
    first.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "lo')  # killed here
    second = Metrics(tmp_path, MetricsConfig(), 0, steps_done=5)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    second.record(6, loss=2.0)
    second.rewind(4)
    second.record(5, loss=3.0)
    second.close()
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    assert read_records(tmp_path / "metrics.jsonl")[-1]["loss"] == 3.0
    Metrics(tmp_path, MetricsConfig(), 0).close()
    assert steps(tmp_path) == []


def every_line(folder: Path) -> list[int]:
    """The steps of all lines; each must be whole."""
    text = (folder / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line)["step"] for line in text.splitlines()]


@pytest.mark.parametrize("num_bytes", [1, 5, 9, 30])
def test_a_line_that_a_kill_cut_short_is_not_continued(tmp_path: Path, num_bytes: int):
    """The newest kept record stands right before it: what comes next must begin a line of its own."""
    first = Metrics(tmp_path, MetricsConfig(), 0)
    for step in (1, 2, 3):
        first.record(step, loss=float(step))
    first.close()
    path = tmp_path / "metrics.jsonl"
    with open(path, "a") as file:
        file.write(path.read_text().splitlines()[-1].replace('"step": 3', '"step": 4')[:num_bytes])
    second = Metrics(tmp_path, MetricsConfig(), 0, steps_done=3)
    assert every_line(tmp_path) == [1, 2, 3]
    second.record(4, loss=4.0)
    second.close()
    assert every_line(tmp_path) == [1, 2, 3, 4]
    assert [record["loss"] for record in read_records(path)] == [1.0, 2.0, 3.0, 4.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_records_after_a_broken_line_are_kept(tmp_path: Path):
    """As where a killed run was continued by something that only appends."""
    lines = [
        '{"step": 1, "loss": 1.0}',
        '{"step": 2, "lo{"step": 2, "loss": 2.5}',
        '{"step": 3, "loss": 3.0}',
        "[4]",
        '{"loss": 5.0}',
        '{"step": "6"}',
        "",
        '{"step": 7, "loss": 7.0}',
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines))
    assert [record["step"] for record in read_records(path)] == [1, 3, 7]
    metrics = Metrics(tmp_path, MetricsConfig(), 0, steps_done=3)
    metrics.record(4)
    metrics.rewind(4)
    assert every_line(tmp_path) == [1, 3, 4]
    metrics.rewind(3)
    metrics.record(5)
    metrics.close()
    assert every_line(tmp_path) == [1, 3, 5]
    assert read_records(tmp_path / "absent.jsonl") == []


def test_every_rank_hears_every_record(tmp_path: Path):
    heard: list[tuple[int, int, dict[str, object]]] = []
    for rank in (0, 1):
        metrics = Metrics(tmp_path / str(rank), MetricsConfig(), rank)
        metrics.on_record = lambda step, values, rank=rank: heard.append((rank, step, dict(values)))
        metrics.record(2, loss=1.5)
        assert [record["loss"] for record in read_records(metrics.path)] == ([1.5] if rank == 0 else [])
        metrics.close()
    assert heard == [(0, 2, {"loss": 1.5}), (1, 2, {"loss": 1.5})]


def test_infinities_are_words_that_float_reads(tmp_path: Path):
    metrics = Metrics(tmp_path, MetricsConfig(), 0)
    metrics.record(1, up=float("inf"), down=torch.tensor(float("-inf")), huge=1e308, yes=True)
    metrics.close()
    (record,) = read_records(tmp_path / "metrics.jsonl")
    assert {name: record[name] for name in ("up", "down", "huge", "yes")} == {
        "up": "inf", "down": "-inf", "huge": 1e308, "yes": True,
    }  # fmt: skip
    assert float(record["down"]) == -float("inf")


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"metrics cannot be written(.|\n)*set folder"):
        Metrics(tmp_path / "file" / "run", MetricsConfig(), 0)


@pytest.mark.parametrize(
    ("name", "settings"), [("tensorboard", {"tensorboard": True}), ("wandb", {"wandb": "project"})]
)
def test_absent_trackers_are_named_with_the_extra(tmp_path: Path, name: str, settings: dict, hidden_modules):
    hidden_modules(name)
    with pytest.raises(EnvironmentProblem, match=rf"{name} is not installed(.|\n)*shardwise\[{name}\]") as caught:
        Metrics(tmp_path, MetricsConfig(**settings), 0)
    assert caught.value.exit_code == 3


def test_tensorboard_gets_the_numbers(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    metrics = Metrics(tmp_path, MetricsConfig(tensorboard=True), 0)
    metrics.record(1, loss=1.5, note="text")
    metrics.record(2, loss=float("nan"))
    metrics.record(3, loss=0.5)
    metrics.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.5), (3, 0.5)]
    assert events.Tags()["scalars"] == ["loss"]


def test_tensorboard_hides_what_a_run_rewinds(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    metrics = Metrics(tmp_path, MetricsConfig(tensorboard=True), 0)
    for step in (1, 2, 3):
        metrics.record(step, loss=float(step))
    metrics.rewind(1)
    metrics.record(2, loss=20.0)
    metrics.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 20.0)]


@pytest.mark.slow
def test_wandb_gets_the_numbers_offline(tmp_path: Path):
    """In a process of its own: wandb leaves a server running until its process ends."""
    pytest.importorskip("wandb")
    script = (
        "import sys; from pathlib import Path\n"
        "from shardwise.training.metrics import WeightsAndBiases\n"
        "tracker = WeightsAndBiases('project', Path(sys.argv[1]))\n"
        "tracker.write(1, {'loss': 1.5, 'note': 'text'}); tracker.close()\n"
    )
    offline = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=offline, check=True, timeout=60)
    (stored,) = [path for path in tmp_path.rglob("*") if path.suffix == ".wandb"]
    assert b"loss" in stored.read_bytes()


@pytest.fixture
def hidden_modules(monkeypatch: pytest.MonkeyPatch):
    def hide(name: str) -> None:
        monkeypatch.setitem(sys.modules, name, None)

    return hide
