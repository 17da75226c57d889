"""Ray Train on a local cluster of two CPU workers: trains, reports, survives kill -9 of a worker, stops when asked."""

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.train_runs import (
    SHARDWISE,
    STEPS,
    committed,
    losses,
    past,
    rank_pids,
    running,
    wait_until,
    write_run,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs shardwise[ray]"),
]


def driver(folder: Path, max_failures: int = 1, *settings: str) -> list[str]:
    return [sys.executable, "-m", "tests.faults.ray_driver", str(folder), str(max_failures), *settings]


def result(output: str) -> dict[str, Any]:
    line = next(line for line in output.splitlines() if line.startswith("TRAINING "))
    return json.loads(line.removeprefix("TRAINING "))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """What our own launcher makes of the run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with running([*SHARDWISE, "train", str(write_run(folder)), "--nproc", "2"], folder) as run:
        assert run.wait() == 0, run.output
    return losses(folder)


def test_a_killed_worker_costs_nothing_but_time(tmp_path: Path, undisturbed: dict[int, float]):
    write_run(tmp_path, pause_s=0.2)
    with running(driver(tmp_path), tmp_path) as run:
        wait_until(past(tmp_path, 12), run, 300)
        worker = psutil.Process(rank_pids(tmp_path)[1])
        assert "RayTrainWorker" in worker.cmdline()[0], "each rank is a worker of Ray"
        worker.send_signal(signal.SIGKILL)
        (tmp_path / "pause").write_text("0")
        assert run.wait(400) == 0, run.output[-4000:]
    assert losses(tmp_path) == undisturbed, "the same bits, each step once"
    training = result(run.output)
    assert training["resumed_step"] >= 10
    assert (training["steps"], training["stopped"], training["num_ranks"]) == (STEPS, None, 2)
    reports = [json.loads(line) for line in (tmp_path / "reports.jsonl").read_text().splitlines()]
    assert all(len(of_workers) == 2 for of_workers in reports)
    reported = {of_workers[0]["step"]: of_workers[0]["loss"] for of_workers in reports}
    missing = set(range(5, STEPS + 1, 5)) - set(reported)
    assert missing <= {training["resumed_step"]}, "at most the report that the killed worker did not come to"
    assert reported == {step: undisturbed[step] for step in reported}


def test_a_stopped_driver_saves_and_a_mistake_is_raised_once(tmp_path: Path):
    """One start of Ray less than two tests; the second part continues with the run of the first."""
    write_run(tmp_path, pause_s=0.2)
    with running(driver(tmp_path), tmp_path, "first") as run:
        wait_until(past(tmp_path, 7), run, 300)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait(400) == 0, run.output[-4000:]
    training = result(run.output)
    assert training["stopped"] == "SIGTERM"
    assert training["steps"] == committed(tmp_path)[-1] == max(losses(tmp_path)) < STEPS
    with running(driver(tmp_path, 3, "training.batch_size=3"), tmp_path, "second") as run:
        assert run.wait(400) == 2, run.output[-4000:]
    assert run.output.count("RAISED ConfigError") == 1
    assert "batch_size" in run.output
    assert run.output.count("Started training worker group") == 1, "not tried again"
