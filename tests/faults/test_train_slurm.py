"""The Slurm files of examples/cluster in the environment that Slurm gives: stopped, killed, queued again."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.faults.slurm_stand_in import install
from tests.faults.train_runs import (
    ROOT,
    SHARDWISE,
    STEPS,
    Running,
    committed,
    losses,
    past,
    rank_pids,
    running,
    wait_until,
    write_run,
)

pytestmark = pytest.mark.slow

CLUSTER = ROOT / "examples/cluster"


def job(folder: Path, *, num_nodes: int = 1, restarts: int = 0) -> dict[str, str]:
    """What a batch script of two tasks finds in its environment."""
    return {
        "PATH": install(folder),
        "SLURM_JOB_ID": str(os.getpid() % 10000 + 10000 * num_nodes),  # it makes the port
        "SLURM_JOB_NODELIST": "127.0.0.1",
        "SLURM_NNODES": str(num_nodes),
        "SLURM_NTASKS": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_RESTART_COUNT": str(restarts),
        "SHARDWISE_FOLDER": str(folder / "run"),
        "SHARDWISE_RANKS_PER_NODE": "1",
    }


def batch(name: str, folder: Path) -> list[str]:
    return ["bash", str(CLUSTER / name), str(folder / "run.yaml")]


def requeued(folder: Path) -> int:
    file = folder / "scontrol"
    return file.read_text().count("requeue ") if file.exists() else 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with running([*SHARDWISE, "train", str(write_run(folder)), "--nproc", "2"], folder) as run:
        assert run.wait() == 0, run.output
    return losses(folder)


def finish(name: str, folder: Path, **settings: int) -> Running:
    (folder / "pause").write_text("0")
    with running(batch(name, folder), folder, "second", **job(folder, restarts=1, **settings)) as run:
        assert run.wait() == 0, run.output
    return run


def test_a_notice_to_one_task_saves_and_queues_the_job_again(tmp_path: Path, undisturbed: dict[int, float]):
    write_run(tmp_path, pause_s=0.2)
    with running(batch("slurm.sbatch", tmp_path), tmp_path, "first", **job(tmp_path)) as run:
        wait_until(past(tmp_path, 7), run)
        os.kill(rank_pids(tmp_path)[1], signal.SIGUSR1)
        assert run.wait() == 4, run.output
    assert committed(tmp_path)[-1] == max(losses(tmp_path)) < STEPS
    assert "stopped (SIGUSR1)" in run.output
    assert requeued(tmp_path) == 1
    finish("slurm.sbatch", tmp_path)
    assert requeued(tmp_path) == 1
    assert losses(tmp_path) == undisturbed


def test_a_killed_task_is_started_again_with_the_others(tmp_path: Path, undisturbed: dict[int, float]):
    write_run(tmp_path, pause_s=0.2)
    with running(batch("slurm.sbatch", tmp_path), tmp_path, **job(tmp_path)) as run:
        wait_until(past(tmp_path, 7), run)
        os.kill(rank_pids(tmp_path)[0], signal.SIGKILL)
        wait_until(lambda: "attempt 0 ended with status" in run.output, run)
        (tmp_path / "pause").write_text("0")
        assert run.wait() == 0, run.output
    assert "attempt 0 ended with status 137" in run.output
    assert "rank 0 died in step" in run.output or "rank 1 lost another rank" in run.output
    assert losses(tmp_path) == undisturbed
    assert requeued(tmp_path) == 0


def test_a_mistake_is_not_tried_again(tmp_path: Path):
    write_run(tmp_path, data={"sequence_length": -1})
    with running(batch("slurm.sbatch", tmp_path), tmp_path, **job(tmp_path)) as run:
        assert run.wait() == 2, run.output
    assert "attempt" not in run.output
    assert "data.sequence_length" in run.output


def test_torchrun_on_each_machine_saves_when_the_script_is_told(tmp_path: Path, undisturbed: dict[int, float]):
    name = "slurm_torchrun.sbatch"
    write_run(tmp_path, pause_s=0.2)
    with running(batch(name, tmp_path), tmp_path, "first", **job(tmp_path, num_nodes=2)) as run:
        wait_until(past(tmp_path, 7), run)
        agents = {psutil.Process(pid).ppid() for pid in rank_pids(tmp_path).values()}
        assert len(agents) == 2, "a torchrun on each machine"
        os.kill(run.process.pid, signal.SIGUSR1)
        assert run.wait() == 4, run.output
    assert committed(tmp_path)[-1] == max(losses(tmp_path)) < STEPS
    assert requeued(tmp_path) == 1
    finish(name, tmp_path, num_nodes=2)
    assert losses(tmp_path) == undisturbed
