"""What a plain `shard` must not take for a divergence."""

import gc
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise.fsdp1 import FullyShardedDataParallel
from shardwise.sharding.apply import shard
from shardwise.sharding.hooks import watching
from tests.ranks import ranks


@ranks(4)
def test_replicas_may_evaluate_on_their_own(rank: int):
    """All-gathers are collectives of a shard group; only reductions are those of all ranks."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)]), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with torch.no_grad():
            for _ in range(1 + rank // 2):
                model(torch.ones(2, 16))
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()


@ranks(2)
def test_fsdp1s_ranks_are_compared_too(rank: int):
    model = FullyShardedDataParallel(nn.Sequential(FullyShardedDataParallel(nn.Linear(16, 16)), nn.Linear(16, 16)))
    model(torch.ones(2, 16)).sum().backward()
    assert len(model.__dict__["_shardwise_watch"].tracers) == 1


@ranks(2)
def test_models_of_the_same_ranks_are_compared_in_one_order_whichever_of_them_live(rank: int):
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = shard(nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)]))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()

    first, second = build(), build()
    step(*first)
    step(*second)
    (tracer,) = second[0].__dict__["_shardwise_watch"].tracers
    assert first[0].__dict__["_shardwise_watch"].tracers == [tracer]
    num_opened = tracer.num_opened
    if rank == 0:
        del first, second  # the other rank collects them later, or never
        gc.collect()
        assert tracer.is_closed
    third = build()
    assert third[0].__dict__["_shardwise_watch"].tracers == [tracer]
    assert tracer.num_opened == num_opened + 1
    step(*third)
    dist.barrier()


@ranks(2)
def test_a_model_may_be_deleted_while_the_next_is_sharded(rank: int):
    """The garbage collector may run between any two statements: it must not close what the next model is given."""
    torch.manual_seed(0)
    earlier = [shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))]
    gather = watching.gather_objects

    def gather_and_collect(*args: Any, **kwargs: Any) -> Any:
        earlier.clear()
        gc.collect()
        return gather(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watching, "gather_objects", gather_and_collect)
        model = shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert any(thread.name == "shardwise-guard" for thread in threading.enumerate())
    model(torch.ones(2, 4)).sum().backward()
    (tracer,) = model.__dict__[watching._ATTRIBUTE].tracers
    assert not tracer.is_closed
    assert tracer.trace.count
