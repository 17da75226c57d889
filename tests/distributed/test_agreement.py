"""shardwise.distributed.agreement on real ranks: all raise, all agree, nobody waits."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from shardwise.distributed.agreement import Channel, agree_on, on_rank_zero, raise_on_all_ranks
from shardwise.errors import ConfigError, ShardError
from tests.ranks import ranks


class Unpicklable(Exception):
    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)


@ranks(2)
def test_result_of_rank_zero_reaches_every_rank(rank: int):
    calls = []
    assert on_rank_zero(lambda: calls.append(rank) or {"step": 3}) == {"step": 3}
    assert calls == ([0] if rank == 0 else [])


@ranks(2)
def test_failure_on_rank_zero_raises_on_every_rank(rank: int):
    def work() -> None:
        raise FileExistsError("the folder is taken")

    with pytest.raises(FileExistsError, match="the folder is taken") as failure:
        on_rank_zero(work)
    assert getattr(failure.value, "__notes__", []) == ([] if rank == 0 else ["(raised on rank 0)"])
    dist.barrier()


@ranks(2)
def test_shardwise_error_keeps_its_rows_across_ranks(rank: int):
    def work() -> None:
        raise ConfigError("no", where="here", why="because", fix="do this")

    with pytest.raises(ConfigError) as failure:
        on_rank_zero(work)
    assert (failure.value.where, failure.value.why, failure.value.fix) == ("here", "because", "do this")


@ranks(2)
def test_error_or_result_that_cannot_be_pickled_still_raises_everywhere(rank: int):
    def work() -> None:
        raise Unpicklable(1, "cannot travel")

    with pytest.raises(Unpicklable if rank == 0 else ShardError, match="cannot travel"):
        on_rank_zero(work)
    with pytest.raises(Exception, match="pickle"):
        on_rank_zero(lambda: lambda: None)
    dist.barrier()


@ranks(4)
def test_difference_is_shown_with_the_ranks_that_differ(rank: int):
    agree_on("the same", "the plan")
    with pytest.raises(ShardError) as failure:
        agree_on("first\nsecond" if rank < 3 else "first\nthird", "the plan")
    assert "the plan" in failure.value.what
    assert failure.value.where == "ranks [3] differ from rank 0"
    assert "-second" in failure.value.why
    assert "+third" in failure.value.why


@ranks(4)
def test_group_of_ranks_fails_among_itself(rank: int):
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    try:
        mine = halves[rank // 2]
        assert isinstance(mine, dist.ProcessGroup)
        assert on_rank_zero(lambda: rank, group=mine) == rank // 2 * 2
        if rank >= 2:
            with pytest.raises(ShardError, match="ranks"):
                agree_on(str(rank), "the value", group=mine)
        else:
            agree_on("equal", "the value", group=mine)
    finally:
        dist.barrier()
        dist.destroy_process_group(halves[rank // 2])  # pyrefly: ignore[bad-argument-type]


@ranks(4)
def test_one_error_becomes_everybodys(rank: int):
    raise_on_all_ranks(None)
    mine = ConfigError("the batch is 0", fix="make it 1") if rank == 2 else None
    with pytest.raises(ConfigError) as failure:
        raise_on_all_ranks(mine)
    assert failure.value.what == ("the batch is 0" if rank == 2 else "rank 2: the batch is 0")
    assert failure.value.fix == "make it 1"
    kind, text = (ValueError, "odd") if rank == 1 else (ShardError, "rank 1: ValueError: odd")
    with pytest.raises(kind, match=text):
        raise_on_all_ranks(ValueError("odd") if rank == 1 else None)


@ranks(2)
@pytest.mark.parametrize("made_by", ["one rank", "all ranks"])
def test_rank_that_does_not_arrive_is_named_within_the_timeout(rank: int, made_by: str):
    """A late one hears of it, too; work that all have begun may take longer."""
    store = dist.distributed_c10d._get_default_store()
    usual = store.timeout
    try:
        store.set_timeout(timedelta(seconds=1))
        channel = Channel() if made_by == "all ranks" else None
        if channel is not None:
            channel.run_on_all(lambda: time.sleep(3 * rank))
        if rank == 1:
            time.sleep(3.5)  # a FileStore looks once a second
        with pytest.raises(ShardError, match=r"ranks \[1\] did not arrive within 1 s"):
            Channel() if channel is None else channel.run_on_all(lambda: None)
    finally:
        store.set_timeout(usual)
        dist.barrier()
