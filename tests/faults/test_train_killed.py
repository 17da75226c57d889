"""`shardwise train` on local ranks: kill -9 of a rank, SIGTERM, Ctrl-C; the run ends as if nothing had happened."""

import os
import signal
from pathlib import Path

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

pytestmark = pytest.mark.slow


def train(folder: Path, *arguments: str) -> list[str]:
    return [*SHARDWISE, "train", str(folder / "run.yaml"), "--nproc", "2", *arguments]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    write_run(folder)
    with running(train(folder), folder) as run:
        assert run.wait() == 0, run.output
    found = losses(folder)
    assert sorted(found) == list(range(1, STEPS + 1))
    assert found[STEPS] < 0.95 * found[1]
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_costs_nothing_but_time(tmp_path: Path, undisturbed: dict[int, float], rank: int):
    write_run(tmp_path, pause_s=0.1)
    with running(train(tmp_path), tmp_path) as run:
        wait_until(past(tmp_path, 12), run)
        os.kill(rank_pids(tmp_path)[rank], signal.SIGKILL)
        assert run.wait() == 0, run.output
    line = f"shardwise: rank {rank} was killed by SIGKILL; starting all 2 ranks again (restart 1 of 3)"
    assert run.output.count(line) == 1
    assert run.output.count("starting all 2 ranks again") == 1
    assert losses(tmp_path) == undisturbed, "the same bits, each step once"


def test_too_many_deaths_end_the_run_with_status_three(tmp_path: Path):
    write_run(tmp_path, pause_s=0.1, training={"max_restarts": 0})
    with running(train(tmp_path), tmp_path) as run:
        wait_until(past(tmp_path, 5), run)
        os.kill(rank_pids(tmp_path)[1], signal.SIGKILL)
        assert run.wait() == 3, run.output
    assert "error: rank 1 was killed by SIGKILL" in run.output


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_stopped_run_ends_with_status_four_and_goes_on(tmp_path: Path, undisturbed: dict[int, float], name: str):
    write_run(tmp_path, pause_s=0.1)
    with running(train(tmp_path), tmp_path, "first") as run:
        wait_until(past(tmp_path, 7), run)
        run.process.send_signal(signal.Signals[name])
        assert run.wait() == 4, run.output
    stopped_at = max(losses(tmp_path))
    assert stopped_at < STEPS
    assert committed(tmp_path)[-1] == stopped_at, "saved where it stopped, not at the last multiple of five"
    assert f"stopped ({name})" in run.output
    (tmp_path / "pause").write_text("0")
    with running(train(tmp_path), tmp_path, "second") as run:
        assert run.wait() == 0, run.output
    assert losses(tmp_path) == undisturbed


def test_a_request_to_one_rank_stops_all(tmp_path: Path):
    """Also where it comes between two steps of that rank: the ranks agree on the step."""
    write_run(tmp_path, pause_s=0.1)
    with running(train(tmp_path), tmp_path) as run:
        wait_until(past(tmp_path, 7), run)
        os.kill(rank_pids(tmp_path)[1], signal.SIGTERM)
        assert run.wait() == 4, run.output
    assert committed(tmp_path)[-1] == max(losses(tmp_path)) < STEPS


def test_the_second_interrupt_does_not_wait(tmp_path: Path):
    write_run(tmp_path, pause_s=20.0)
    with running(train(tmp_path), tmp_path) as run:
        wait_until(lambda: len(rank_pids(tmp_path)) == 2, run)
        os.killpg(run.process.pid, signal.SIGINT)
        wait_until(lambda: "the ranks stop after the next step" in run.output, run)
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.wait(15.0) == 130, run.output
