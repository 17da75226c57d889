"""A run that is killed outright continues, on another number of ranks, as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.config.load import to_yaml
from shardwise.config.run import RunConfig
from shardwise.training.metrics import read_records
from tests.distributed.fit_runs import changed, losses, tiny

STEPS, KILLED_AFTER = 60, 12


def start(config: RunConfig, seen: Path, num_ranks: int) -> subprocess.Popen[str]:
    """`shardwise train` as a user starts it, in a process group of its own."""
    file = seen / f"run-{num_ranks}.yaml"
    file.write_text(to_yaml(config))
    command = [sys.executable, "-m", "shardwise.cli.main", "train", str(file), "--nproc", str(num_ranks)]
    environment = {**os.environ, "SEEN_FOLDER": str(seen), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    return subprocess.Popen(
        command, env=environment, start_new_session=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(run: subprocess.Popen[str]) -> None:
    _, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors


def kill_at(run: subprocess.Popen[str], metrics: Path, step: int) -> None:
    """Kill -9 every process of the run once that step is recorded."""
    deadline = time.monotonic() + 240
    while not any(record["step"] >= step for record in read_records(metrics)):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()


def rows_of(seen: Path, num_ranks: int) -> list[list[tuple[int, ...]]]:
    """What each step saw, over all ranks."""
    files = [seen / f"seen-{num_ranks}-{rank}.jsonl" for rank in range(num_ranks)]
    by_rank = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [[tuple(row) for rows in step for row in rows] for step in zip(*by_rank, strict=False)]


@pytest.mark.slow
def test_two_ranks_killed_and_four_that_go_on_are_two_ranks_that_never_stopped(tmp_path: Path):
    config = tiny(
        tmp_path, steps=STEPS, batch_size=8, micro_batch_size=4, objective="tests.distributed.fit_runs:logged"
    )
    config = changed(config, checkpoint={"every": 5, "keep_last": None})
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = replace(config, folder=str(tmp_path / "whole" / "run"))
    finish(start(whole, tmp_path / "whole", 2))

    killed = start(config, tmp_path / "parts", 2)
    kill_at(killed, tmp_path / "run" / "metrics.jsonl", KILLED_AFTER)
    finish(start(config, tmp_path / "parts", 4))

    assert list(losses(config)) == list(range(1, STEPS + 1))
    assert losses(config) == pytest.approx(losses(whole), abs=1e-5)
    expected, again = rows_of(tmp_path / "whole", 2), rows_of(tmp_path / "parts", 4)
    resumed = STEPS - len(again)
    assert 5 <= resumed < STEPS
    assert resumed % 5 == 0
    assert rows_of(tmp_path / "parts", 2)[:resumed] + again == expected
    seen = [row for step in expected for row in step]
    assert len(seen) == len(set(seen)) == STEPS * 8, "a sample was seen twice before the data was through"


@pytest.mark.slow
def test_killed_run_that_goes_on_on_as_many_ranks_is_the_same_to_the_last_bit(tmp_path: Path):
    config = changed(tiny(tmp_path, steps=STEPS), checkpoint={"every": 5})
    whole = replace(config, folder=str(tmp_path / "whole"))
    finish(start(whole, tmp_path, 2))
    killed = start(config, tmp_path, 2)
    kill_at(killed, tmp_path / "run" / "metrics.jsonl", KILLED_AFTER)
    finish(start(config, tmp_path, 2))
    assert losses(config) == losses(whole)
