"""Ranks that cannot meet: a port in use, a rank 0 that is not there, too few ranks. One error with a fix, status 3."""

import os
import socket
import subprocess
import sys
from contextlib import closing

import pytest

from shardwise.distributed.launchers import Launch, rendezvous_error
from shardwise.errors import EnvironmentProblem

JOIN = """
import sys
from shardwise.errors import ShardwiseError
from shardwise.distributed.mesh import init_distributed
try:
    init_distributed(timeout_s=2)
except ShardwiseError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def listen() -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server


def free_port() -> int:
    with closing(listen()) as server:
        return server.getsockname()[1]


def join(rank: int, port: int) -> subprocess.CompletedProcess[str]:
    """A rank of a Slurm step of two that is alone."""
    slurm = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "1"}
    environment = {**os.environ, **slurm, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", JOIN], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_a_port_in_use_is_named():
    with closing(listen()) as server:
        port = server.getsockname()[1]
        run = join(0, port)
    assert run.returncode == 3, run.stderr
    assert run.stdout.startswith(f"port {port} of this machine is in use\n")
    assert "export MASTER_PORT=PORT" in run.stdout


@pytest.mark.slow
def test_a_rank_zero_that_is_not_there_is_named():
    port = free_port()
    run = join(1, port)
    assert run.returncode == 3, run.stderr
    assert run.stdout.startswith(f"no rank 0 answers at 127.0.0.1:{port} (2 s)\n")
    assert "MASTER_ADDR" in run.stdout


@pytest.mark.slow
def test_ranks_that_do_not_come_are_counted():
    port = free_port()
    run = join(0, port)
    assert run.returncode == 3, run.stderr
    assert run.stdout.startswith(f"only 1 of 2 ranks came to 127.0.0.1:{port} within 2 s\n")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            "The server socket has failed to listen. port: 7, EADDRINUSE, message: address already in use",
            "in use",
        ),
        ("The server socket has failed to listen. port: 80, name: EACCES", "cannot listen on port 7"),
        ("Timed out after 6 seconds waiting for clients. 3/8 clients joined.", "only 3 of 8 ranks came to host:7"),
        ("The client socket has timed out after 5000ms while trying to connect to (host, 7).", "no rank 0 answers"),
    ],
)
@pytest.mark.parametrize("source", ["torchrun", "slurm", "mpi"])
def test_what_torch_says_becomes_one_error(text: str, what: str, source: str):
    launch = Launch(rank=1, world_size=8, local_world_size=8, master_addr="host", master_port=7, source=source)
    error = rendezvous_error(RuntimeError(text), launch, 600.0)
    assert isinstance(error, EnvironmentProblem)
    assert what in error.what
    assert f"rank 1 of 8 ({source})" == error.where
    assert error.why
    assert error.fix
