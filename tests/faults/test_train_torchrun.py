"""`shardwise train` under torchrun: two agents that meet on loopback, one of them lost, and SIGTERM."""

import os
import signal
import socket
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest

from tests.faults.train_runs import (
    SHARDWISE,
    STEPS,
    TORCHRUN,
    committed,
    losses,
    past,
    rank_pids,
    running,
    wait_until,
    write_run,
)

pytestmark = pytest.mark.slow

COMMAND = str(Path(sys.executable).with_name("shardwise"))


def free_port() -> int:
    with closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def answers(port: int) -> bool:
    with closing(socket.socket()) as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def agent(port: int, *program: str) -> list[str]:
    """One of two machines with one rank each; a lost one is noticed in ten seconds and waited for another 25."""
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-id", "two-agents", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    patience = "last_call_timeout=25,keep_alive_interval=3,keep_alive_max_attempt=3"
    size = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--local-addr", "127.0.0.1"]
    return [*TORCHRUN, *size, *rendezvous, "--rdzv-conf", patience, *program]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with running([*SHARDWISE, "train", str(write_run(folder)), "--nproc", "2"], folder) as run:
        assert run.wait() == 0, run.output
    return losses(folder)


def test_two_agents_train_one_model_and_one_goes_on_when_the_other_is_lost(
    tmp_path: Path, undisturbed: dict[int, float]
):
    file = str(write_run(tmp_path, pause_s=0.2))
    port = free_port()
    with ExitStack() as stack:
        kept = stack.enter_context(running(agent(port, "-m", "shardwise", "train", file), tmp_path, "kept"))
        wait_until(lambda: answers(port), kept)  # the first one keeps the store, without which there is no restart
        lost = stack.enter_context(running(agent(port, "--no-python", COMMAND, "train", file), tmp_path, "lost"))
        wait_until(past(tmp_path, 12), kept)
        ranks = {psutil.Process(pid).ppid(): rank for rank, pid in rank_pids(tmp_path).items()}
        assert sorted(ranks) == sorted([kept.process.pid, lost.process.pid]), "each agent has one rank"
        gone = ranks[lost.process.pid]
        os.kill(lost.process.pid, signal.SIGKILL)  # the machine is gone: agent and rank
        os.kill(rank_pids(tmp_path)[gone], signal.SIGKILL)
        (tmp_path / "pause").write_text("0")
        assert kept.wait() == 0, kept.output
    assert f"error: rank {gone} died in step" in kept.output or "lost another rank" in kept.output
    assert "on 1 rank:" in kept.output
    assert " steps from step " in kept.output, "it went on from a checkpoint"
    found = losses(tmp_path)
    assert found == pytest.approx(undisturbed, abs=1e-5), "on one rank what two would have done"
    assert committed(tmp_path)[-1] == STEPS


def test_sigterm_to_torchrun_saves(tmp_path: Path, undisturbed: dict[int, float]):
    file = str(write_run(tmp_path, pause_s=0.2))
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "shardwise", "train", file]
    with running(command, tmp_path, "first") as run:
        wait_until(past(tmp_path, 7), run)
        run.process.terminate()
        assert run.wait() != 0
    stopped_at = max(losses(tmp_path))
    assert committed(tmp_path)[-1] == stopped_at < STEPS
    assert "stopped (SIGTERM)" in run.output
    (tmp_path / "pause").write_text("0")
    with running(command, tmp_path, "second") as run:
        assert run.wait() == 0, run.output
    assert losses(tmp_path) == undisturbed
