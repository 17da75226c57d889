"""Ranks with loaders of different lengths stop together, and fail together."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from shardwise.errors import ShardError
from shardwise.training.step import lockstep
from tests.ranks import ranks


def all_ranks(value: object) -> list[object]:
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@ranks(4)
@pytest.mark.parametrize("lengths", [(3, 5, 4, 9), (4, 4, 4, 4), (2, 0, 5, 1)])
def test_all_ranks_stop_with_the_shortest(rank: int, lengths: tuple[int, ...]):
    seen = []
    for batch in lockstep(range(lengths[rank])):
        seen.append(batch)
        assert all_ranks(batch) == [batch] * 4  # a rank that went on alone would hang here
    assert seen == list(range(min(lengths)))
    assert all_ranks("after") == ["after"] * 4


@ranks(2)
def test_collectives_of_the_loader_itself_stay_in_order(rank: int):
    """A loader may talk to the other ranks too, say to shuffle."""

    def talking() -> Iterator[int]:
        for index in range(3 + rank):
            assert all_ranks(index) == [index] * 2
            yield index
            if index == 2:
                return

    assert list(lockstep(talking())) == [0, 1, 2]


def failing(at: int) -> Iterator[int]:
    for index in range(10):
        if index == at:
            raise OSError(f"shard {at} is unreadable")
        yield index


@ranks(2)
@pytest.mark.parametrize("at", [0, 2])
def test_error_of_one_loader_is_raised_on_every_rank(rank: int, at: int):
    seen = []
    kind = OSError if rank == 1 else ShardError
    batches = lockstep(failing(at) if rank == 1 else iter(range(10)))
    with pytest.raises(kind, match=f"shard {at} is unreadable") as caught:
        seen.extend(batches)
    assert seen == list(range(at)), "batches before the failure are delivered"
    if rank == 0:
        assert "rank 1" in str(caught.value)
    assert all_ranks("after") == ["after"] * 2


@ranks(2)
def test_loader_that_fails_where_another_ends_fails_everywhere(rank: int):
    with pytest.raises((OSError, ShardError), match="unreadable"):
        list(lockstep(failing(2) if rank == 1 else iter(range(2))))


@ranks(2)
def test_leaving_the_loop_early_leaves_the_group_usable(rank: int):
    for batch in lockstep(range(10)):
        if batch == 3:
            break
    gc.collect()
    assert all_ranks(rank) == [0, 1]


def test_without_a_process_group_it_is_the_loader():
    assert list(lockstep("abc")) == ["a", "b", "c"]
    with pytest.raises(OSError, match="unreadable"):
        list(lockstep(failing(1)))
