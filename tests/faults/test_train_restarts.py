"""Local ranks that die are started again, up to `max_restarts` times; errors of the user are not tried again."""

import os
import time
from pathlib import Path

import pytest

from shardwise.distributed.local_ranks import ErrorReport, find_cause, is_lost_peer, start_local
from shardwise.distributed.stop_requests import STOP_SIGNALS
from shardwise.errors import ConfigError, EnvironmentProblem, ShardError

pytestmark = pytest.mark.usefixtures("fork_server")

JOBS = "tests.faults.local_jobs"


def report(rank: int, error: BaseException, at_s: float = 1.0) -> ErrorReport:
    return ErrorReport(at_s=at_s, rank=rank, error=error, text=f"Traceback\n{type(error).__name__}: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV", "SIGTERM", "exit", "exit 0"])
def test_dead_rank_is_started_again_with_the_others(how: str):
    told: list[str] = []
    start = time.monotonic()
    # With stop signals set, SIGTERM would not end rank 0, which hangs where Python's handlers do not run.
    signals = [name for name in STOP_SIGNALS if name != how]
    results = start_local(f"{JOBS}:die_in_life", 2, (1, how), max_restarts=2, stop_signals=signals, tell=told.append)
    assert results == [1, 1]
    assert time.monotonic() - start < 20, "the rank that hangs must be ended at once"
    ended = {"exit": "ended with status 7", "exit 0": "ended with status 0"}.get(how, f"was killed by {how}")
    assert told == [f"rank 1 {ended}; starting all 2 ranks again (restart 1 of 2)"]


@pytest.mark.slow
def test_restarts_come_to_an_end():
    told: list[str] = []
    with pytest.raises(EnvironmentProblem, match="rank 1 was killed by SIGKILL") as failure:
        start_local(f"{JOBS}:die_in_life", 2, (9, "SIGKILL"), max_restarts=2, tell=told.append)
    assert [line.split("(")[-1] for line in told] == ["restart 1 of 2)", "restart 2 of 2)"]
    assert failure.value.__notes__ == ["(after 2 restarts)"]
    assert failure.value.exit_code == 3


@pytest.mark.slow
@pytest.mark.parametrize("place", ["all_reduce", "barrier"])
def test_the_rank_that_died_is_named_not_the_one_that_lost_it(place: str):
    told: list[str] = []
    assert start_local(f"{JOBS}:lose_a_peer_in", 2, (place, 2), max_restarts=2, tell=told.append) == [2, 2]
    assert len(told) == 2
    assert all(line.startswith("rank 1 was killed by SIGKILL; ") for line in told)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["refuse", "refuse_and_abort"])
def test_mistakes_of_the_user_are_not_tried_again(tmp_path: Path, job: str):
    with pytest.raises(ConfigError, match="a bad value"):
        start_local(f"{JOBS}:{job}", 2, (str(tmp_path),), max_restarts=2)
    assert {name.split("-")[1] for name in os.listdir(tmp_path)} == {"0"}


@pytest.mark.slow
def test_a_lost_peer_without_a_dead_one_is_tried_again():
    told: list[str] = []
    message = "[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1"
    assert start_local(f"{JOBS}:fail_as_torch_does", 2, (message,), max_restarts=1, tell=told.append) == [1, 1]
    assert "raised RuntimeError" in told[0]
    with pytest.raises(RuntimeError, match="shapes"):
        start_local(f"{JOBS}:fail_as_torch_does", 2, ("shapes do not fit",), max_restarts=1)


def test_wrong_signal_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="'SIGSTOP' is not a signal"):
        start_local("no_such_module:main", 1, stop_signals=["SIGSTOP"])


def test_the_first_thing_that_went_wrong_is_the_cause():
    lost = RuntimeError("Connection closed by peer")
    own = ConfigError("bad")
    for exit_codes, reports, rank, may_pass in (
        ({0: 1, 1: -9}, [report(0, lost)], 1, True),  # killed, and lost
        ({0: 1, 1: -9}, [report(0, own)], 1, True),  # killed; ours says so in its words
        ({0: 1, 1: -6}, [report(0, own)], 0, False),  # aborted because of the other's error
        ({0: -6, 1: 1}, [report(1, lost)], 0, True),
        ({0: 1, 1: 7}, [report(0, lost)], 1, True),
        ({0: 1, 1: 1}, [report(1, lost, 1.0), report(0, own, 2.0)], 0, False),
        ({0: 1, 1: 1}, [report(1, lost), report(0, lost, 2.0)], 1, True),
        ({0: 1}, [report(0, ValueError("x"))], 0, False),
        ({1: -64}, [], 1, True),
    ):
        cause = find_cause(exit_codes, reports)
        assert (cause.rank, cause.may_pass) == (rank, may_pass), (exit_codes, reports)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[pair.cc:5] Connection reset by peer"), True),
        (RuntimeError("NCCL error ... ncclRemoteError: A call failed possibly due to a network error"), True),
        (ConnectionResetError("x"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (KeyError("connection closed"), False),
        (ConfigError("connection refused"), False),
        (ShardError("rank 3 died in step 19"), True),  # guard
        (ShardError("rank 3 has left the training loop after 2 steps; rank 0 continues"), False),
        (None, False),
    ],
)
def test_lost_peers_are_told_from_other_errors(error: BaseException | None, lost: bool):
    assert is_lost_peer(error, "Traceback\nsomething") is lost
    assert is_lost_peer(None, "Traceback\nRuntimeError: Broken pipe")


def test_torchs_own_distributed_errors_are_lost_peers():
    import torch.distributed as dist

    assert is_lost_peer(dist.DistNetworkError("x"), "")
    assert is_lost_peer(dist.DistBackendError("x"), "")
