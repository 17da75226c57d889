"""Launchers' defaults, and what is said of ranks that died, raised or never met: exact ranks, ports and words."""

from __future__ import annotations

import pytest
import torch

from shardwise.distributed.launchers import Launch, first_host, read_launch, rendezvous_error
from shardwise.distributed.local_ranks import ErrorReport, find_cause, is_lost_peer
from shardwise.errors import ConfigError, EnvironmentProblem, ShardError, TrainingError

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8"}
SLURM = {"SLURM_PROCID": "6", "SLURM_STEP_NUM_TASKS": "9"}
MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        pytest.param(
            TORCHRUN,
            Launch(
                rank=5, world_size=8, local_rank=5, local_world_size=8, master_addr="127.0.0.1", master_port=29500,
                source="torchrun",
            ),
            id="torchrun-bare",
        ),
        pytest.param(
            {**TORCHRUN, "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "7", "RAY_ADDRESS": "x"},
            Launch(
                rank=5, world_size=8, local_rank=1, local_world_size=4, master_addr="h", master_port=7, source="ray",
            ),
            id="ray-local-rank-from-rank",
        ),
        pytest.param(
            {"WORLD_SIZE": "1", "RANK": "0", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "3"},
            Launch(master_addr="127.0.0.1", master_port=29500, restarts=3, source="torchrun"),
            id="torchrun-one",
        ),
        pytest.param(
            {**SLURM, "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2),5", "SLURM_JOB_NODELIST": "n[08-10]"},
            Launch(rank=6, world_size=9, local_world_size=5, master_addr="n08", master_port=20000, source="slurm"),
            id="slurm-repeated",
        ),
        pytest.param(
            {**SLURM, "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2),5", "SLURM_LOCALID": "1",
             "SLURM_STEP_NODELIST": "a1,a2", "SLURM_JOB_NODELIST": "b", "SLURM_JOB_ID": "20001"},
            Launch(rank=6, local_rank=1, world_size=9, local_world_size=2, master_addr="a1", master_port=20001,
                   job="slurm-20001", source="slurm"),
            id="slurm-step",
        ),
        pytest.param(
            {**SLURM, "SLURM_NODEID": "3", "SLURM_STEP_TASKS_PER_NODE": "3(x3)", "MASTER_ADDR": "m",
             "MASTER_PORT": "99", "SLURM_JOB_ID": "4", "SLURM_RESTART_COUNT": "2"},
            Launch(rank=6, world_size=9, local_world_size=9, master_addr="m", master_port=99, restarts=2,
                   job="slurm-4", source="slurm"),
            id="slurm-node-beyond-the-list",
        ),
        pytest.param(SLURM, Launch(rank=6, world_size=9, local_world_size=9, master_addr="127.0.0.1",
                                   master_port=20000, source="slurm"), id="slurm-bare"),
        pytest.param({"SLURM_STEP_NUM_TASKS": "3"}, Launch(), id="slurm-without-number"),
        pytest.param(MPI, Launch(world_size=4, master_addr="127.0.0.1", master_port=29500, source="mpi"), id="mpi"),
        pytest.param({"OMPI_COMM_WORLD_SIZE": "4"}, Launch(), id="mpi-without-rank"),
    ],
)  # fmt: skip
def test_launchers_and_their_defaults(environment: dict[str, str], expected: Launch):
    assert read_launch(environment) == expected


@pytest.mark.parametrize(
    ("launch", "method"),
    [
        (Launch(), None),
        (Launch(source="torchrun", master_addr="a", master_port=1), "env://"),
        (Launch(source="ray"), "env://"),
        (Launch(source="slurm", master_addr="a", master_port=1), "tcp://a:1"),
        (Launch(source="mpi", master_addr="b", master_port=2), "tcp://b:2"),
    ],
    ids=["single", "torchrun", "ray", "slurm", "mpi"],
)
def test_where_ranks_meet(launch: Launch, method: str | None):
    assert launch.init_method == method


@pytest.mark.parametrize(
    ("environment", "what", "where"),
    [
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is '-1'", "environment of this process"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "rank 0 is not below the number of ranks, 0", "environment of torchrun"),
        ({"WORLD_SIZE": "2"}, "RANK is not set", "environment of this process"),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, "local rank 1 is not below the number of ranks, 1",
         "environment of mpi"),
        ({**SLURM, "SLURM_PROCID": "9"}, "rank 9 is not below the number of ranks, 9", "environment of slurm"),
    ],
    ids=["negative", "nobody", "no-rank", "mpi", "slurm"],
)  # fmt: skip
def test_contradictions(environment: dict[str, str], what: str, where: str):
    with pytest.raises(EnvironmentProblem) as caught:
        read_launch(environment)
    assert (caught.value.what, caught.value.where) == (what, where)


@pytest.mark.parametrize(("hosts", "first"), [("", "127.0.0.1"), ("[1-2]", "127.0.0.1"), ("a[01,3]x", "a01")])
def test_odd_host_lists(hosts: str, first: str):
    assert first_host(hosts) == first


def report(rank: int, error: BaseException | None, text: str = "") -> ErrorReport:
    return ErrorReport(
        at_s=float(rank), rank=rank, error=error, text=text or f"Traceback\n{type(error).__name__}: {error}"
    )


LOST = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]")


@pytest.mark.parametrize(
    ("exit_codes", "reports", "expected"),
    [
        pytest.param({2: -9}, [report(0, LOST)], (2, "was killed by SIGKILL", True), id="signal-first"),
        pytest.param(
            {1: -6, 0: -9}, [report(2, ValueError("x"))], (0, "was killed by SIGKILL", True), id="kill-before-abort"
        ),
        pytest.param(
            {1: -6}, [report(2, ValueError("x"))], (2, "raised ValueError: x", False), id="abort-follows-an-error"
        ),
        pytest.param({1: -6}, [report(0, LOST)], (1, "was killed by SIGABRT", True), id="abort-first"),
        pytest.param({1: 3}, [report(0, LOST)], (1, "ended with status 3", True), id="exit"),
        pytest.param({1: 3}, [report(0, KeyError("k"))], (0, "raised KeyError: 'k'", False), id="error-before-exit"),
        pytest.param(
            {0: 1, 1: 1}, [report(0, LOST), report(1, OSError("disk"))], (1, "raised OSError: disk", False), id="cause"
        ),
        pytest.param({0: 1}, [report(0, LOST)], (0, f"raised RuntimeError: {LOST}", True), id="lost-alone"),
        pytest.param({3: -34}, [], (3, "was killed by SIGRTMIN", True), id="real-time"),
        pytest.param({3: -35}, [], (3, "was killed by signal 35", True), id="nameless"),
    ],
)
def test_the_first_thing_that_went_wrong(
    exit_codes: dict[int, int], reports: list[ErrorReport], expected: tuple[int, str, bool]
):
    cause = find_cause(exit_codes, reports)
    assert (cause.rank, cause.how, cause.may_pass) == expected
    reported = {each.rank: each.error for each in reports}
    if cause.rank in reported and cause.how.startswith("raised"):
        assert cause.error is reported[cause.rank]
        assert cause.error.__notes__[-1].startswith(f"(raised on rank {cause.rank})\nTraceback\n")
    else:
        assert isinstance(cause.error, EnvironmentProblem)
        assert cause.error.what == f"rank {cause.rank} {cause.how}"
        assert cause.error.where == f"rank {cause.rank}"


def test_an_error_that_could_not_travel_keeps_its_last_line():
    cause = find_cause({0: 1}, [report(0, None, "Traceback\nmine.Odd: told\n\n")])
    assert (type(cause.error), str(cause.error), cause.how) == (RuntimeError, "mine.Odd: told", "raised mine.Odd: told")


@pytest.mark.parametrize(
    ("error", "text", "lost"),
    [
        (LOST, "", True),
        (RuntimeError("Broken pipe"), "", True),
        (RuntimeError("NCCL watchdog"), "", True),
        (RuntimeError("shapes differ"), "", False),
        (RuntimeError("shapes differ"), "first: connection reset\nRuntimeError: shapes differ", False),
        (None, "x\nDistBackendError: ncclRemoteError: gone", True),
        (None, "", False),
        (ValueError("connection reset"), "", False),
        (ConnectionResetError("gone"), "", True),
        (torch.distributed.DistBackendError("any"), "", True),
        (ShardError("rank 3 died in step 7"), "", True),
        (ShardError("rank 3 did not run `x` at step 7; connection closed"), "", False),
        (ConfigError("connection closed"), "", False),
    ],
    ids=range(13),
)
def test_a_lost_peer_is_told_from_an_error_of_ones_own(error: BaseException | None, text: str, lost: bool):
    assert is_lost_peer(error, text) is lost


HERE = Launch(rank=1, world_size=4, master_addr="host", master_port=4321, source="torchrun")
THERE = Launch(rank=1, world_size=4, master_addr="host", master_port=4321, source="slurm")


@pytest.mark.parametrize(
    ("message", "launch", "what", "why", "fix"),
    [
        ("bind: EADDRINUSE", HERE, "port 4321 of this machine is in use", "another job", "--master-port PORT"),
        ("Address already in use", THERE, "port 4321 of this machine is in use", "another job", "export MASTER_PORT"),
        (
            "The server socket has failed to listen on any local network address. Exception raised from x",
            HERE, "rank 0 cannot listen on port 4321",
            "The server socket has failed to listen on any local network address", "above 1024",
        ),
        ("Timed out after 31 seconds waiting for clients. 2/4 clients joined.", HERE,
         "only 2 of 4 ranks came to host:4321 within 31 s", "were not started", "WORLD_SIZE"),
        ("no route\nmore", HERE, "no rank 0 answers at host:4321 (31 s)", "(no route)", "MASTER_ADDR"),
        ("", HERE, "no rank 0 answers at host:4321 (31 s)", "()", "firewall"),
    ],
    ids=["in-use", "in-use-slurm", "listen", "joined", "no-answer", "silent"],
)  # fmt: skip
def test_ranks_that_cannot_meet(message: str, launch: Launch, what: str, why: str, fix: str):
    error = rendezvous_error(RuntimeError(message), launch, 31.0)
    assert error.what == what
    assert error.where == f"rank 1 of 4 ({launch.source})"
    assert why in error.why
    assert fix in error.fix


def test_out_of_memory_is_tried_again_where_the_next_start_needs_less():
    """As micro-batching says it after the first steps; with a single sequence nothing would change."""
    again = TrainingError("rank 1 ran out of memory in step 9 of this process: full", where="training.micro_batch_size")
    assert find_cause({1: 1}, [report(1, again, "Traceback\nTrainingError: full")]).may_pass
    never = TrainingError("rank 1 ran out of memory with a single sequence: full", where="training.micro_batch_size")
    assert not find_cause({1: 1}, [report(1, never, "Traceback\nTrainingError: full")]).may_pass
