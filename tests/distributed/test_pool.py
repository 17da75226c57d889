"""The pool itself: what it reports, and that it survives what tests do to it."""

import os
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import _pool, ranks


def pids(num_ranks: int) -> list[int | None]:
    return [process.pid for process in _pool(num_ranks).processes]


@ranks(2)
def do_nothing(rank: int):
    pass


@ranks(2)
def fail_on_rank_one(rank: int):
    clue = "a value worth seeing"
    assert rank == 0, clue


@ranks(2)
def fail_everywhere(rank: int):
    raise ValueError(f"rank {rank} is unhappy")


@ranks(2, timeout_s=2)
def hang_on_rank_zero(rank: int):
    if rank == 0:
        dist.barrier()


@ranks(2)
def fail_while_the_other_waits(rank: int):
    if rank == 0:
        dist.barrier()
    raise KeyError("only rank 1 gets here")


@ranks(2)
def be_killed(rank: int):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@ranks(2)
def leak(rank: int, what: str):
    match what:
        case "environment":
            os.environ["SHARDWISE_LEAK"] = "1"
        case "thread":
            threading.Thread(target=time.sleep, args=(30,), name="sleeper", daemon=True).start()
        case "child":
            os.posix_spawn("/bin/sleep", ["sleep", "30"], dict(os.environ))
        case "group":
            dist.new_group([0, 1])
        case "dtype":
            torch.set_default_dtype(torch.float64)
        case "grad":
            torch.set_grad_enabled(False)
        case "hook":
            torch.nn.modules.module.register_module_forward_hook(lambda *_: None)


@ranks(2)
def warn(rank: int):
    warnings.warn("nobody expects this", stacklevel=1)


@ranks(2)
def print_then_fail(rank: int):
    os.write(2, b"a last word from C++\n")
    raise ValueError("after the word")


@ranks(2)
def skip_everywhere(rank: int):
    pytest.skip("no such machine")


@ranks(2)
def skip_on_rank_one(rank: int):
    if rank == 1:
        pytest.skip("not here")


@pytest.mark.parametrize("num", [1, 2])
@ranks(2)
def test_fixtures_and_parameters_reach_every_rank(rank: int, tmp_path: Path, num: int):
    (tmp_path / f"{rank}").write_text(str(num))
    dist.barrier()
    assert [(tmp_path / f"{other}").read_text() for other in range(2)] == [str(num)] * 2


@ranks(4)
def test_collectives_run_between_four_ranks(rank: int):
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    assert total.item() == 6


@ranks(2)
def test_every_test_starts_from_the_same_seed(rank: int):
    assert torch.rand(1).item() == torch.rand(1, generator=torch.Generator().manual_seed(0)).item()
    assert torch.get_num_threads() == 1


def test_pool_outlives_a_test_and_a_shared_failure():
    do_nothing()
    before = pids(2)
    with pytest.raises(pytest.fail.Exception, match=r"(?s)rank 0 is unhappy.*rank 1 is unhappy"):
        fail_everywhere()
    do_nothing()
    assert pids(2) == before


def test_failure_names_the_rank_and_shows_its_values():
    do_nothing()
    before = pids(2)
    with pytest.raises(pytest.fail.Exception) as failure:
        fail_on_rank_one()
    text = str(failure.value)
    assert "rank 1 failed" in text
    assert "rank 0" not in text
    assert "clue = 'a value worth seeing'" in text
    do_nothing()
    assert not set(pids(2)) & set(before), "an asymmetric failure must rebuild the pool"


def test_hang_names_the_ranks_and_where_they_are():
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception) as failure:
        hang_on_rank_zero()
    assert time.monotonic() - start < 30
    assert "ranks [0] hung: a collective was not called on every rank" in str(failure.value)
    assert "in hang_on_rank_zero" in str(failure.value)
    do_nothing()


def test_rank_left_waiting_by_a_failure_is_reported_long_before_the_timeout():
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception) as failure:
        fail_while_the_other_waits()
    assert time.monotonic() - start < 30
    assert "ranks [0] hung" in str(failure.value)
    assert "only rank 1 gets here" in str(failure.value)


def test_killed_rank_is_named_and_replaced():
    with pytest.raises(pytest.fail.Exception, match="rank 1 died: SIGKILL"):
        be_killed()
    do_nothing()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("environment", "SHARDWISE_LEAK"),
        ("thread", "thread 'sleeper' is still running"),
        ("child", "child process .*sleep"),
        ("group", "process group '.*' was not destroyed"),
        ("dtype", "default dtype changed from torch.float32 to torch.float64"),
        ("grad", "grad mode changed from True to False"),
        ("hook", "number of global module hooks changed from 0 to 1"),
    ],
)
def test_leak_fails_the_test_that_leaked(what: str, message: str):
    with pytest.raises(pytest.fail.Exception, match=message):
        leak(what=what)
    do_nothing()


def test_warning_in_a_rank_is_an_error():
    with pytest.raises(pytest.fail.Exception, match="UserWarning: nobody expects this"):
        warn()


def test_output_of_a_failed_rank_is_shown():
    with pytest.raises(pytest.fail.Exception, match=r"(?s)output of rank 1 ---\na last word from C\+\+"):
        print_then_fail()


def test_skip_on_every_rank_skips_the_test():
    with pytest.raises(pytest.skip.Exception, match="no such machine"):
        skip_everywhere()


def test_skip_on_some_ranks_only_is_a_failure():
    with pytest.raises(pytest.fail.Exception, match="some ranks skipped"):
        skip_on_rank_one()


def test_argument_that_cannot_travel_is_explained():
    with pytest.raises(pytest.fail.Exception, match="cannot be sent to the ranks"):
        leak(what=lambda: None)
