"""Collectives: the recorder counts right, and shardwise issues exactly those of FSDP2 written by hand."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.collectives import count_collectives
from tests.ranks import ranks
from tests.zoo import cases
from tests.zoo.checking import mesh_of, sharded, traced_step
from tests.zoo.containers import DIM, InSequential

# Models in which every group is one module that is called in the usual way.
PLAIN = ("tutorial", "reference_llama", "in_sequential", "in_nested_lists", "frozen_tower", "batch_norm")


@ranks(2)
def test_recorder_sees_each_collective_of_a_known_model(rank: int):
    model = InSequential()
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of(2))
    fully_shard(model, mesh=mesh_of(2))
    with count_collectives(model) as trace:
        model(torch.randn(2, DIM)).sum().backward()
    assert trace.count("all_gather", in_backward=False) == 4
    assert trace.count("all_gather", in_backward=True) == 3  # the root stays gathered
    assert trace.count("reduce_scatter") == trace.count("reduce_scatter", in_backward=True) == 4
    assert trace.count("all_gather", served={"blocks.1.up.weight"}) == 2
    assert trace.count("all_reduce") == 0
    block_bytes = 4 * sum(p.numel() for p in InSequential().blocks[0].parameters())
    gathered = [each for each in trace.collectives if each.served == "blocks.1.up.weight"]
    assert gathered[0].num_bytes == block_bytes + block_bytes // 2  # this rank's half in, the whole out


@pytest.mark.parametrize("name", PLAIN)
@ranks(2)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")  # by hand only
def test_same_collectives_as_hand_written_fsdp2(rank: int, name: str):
    case = cases("hard_cases")[name]
    model, plan = sharded(case, mesh_of(2))
    by_hand: nn.Module = case.build()
    modules = dict(by_hand.named_modules())
    for group in plan.groups:
        for module in group.modules:
            fully_shard(modules[module], mesh=mesh_of(2))
    ours, _ = traced_step(case, model)
    theirs, _ = traced_step(case, by_hand)
    assert ours.shape() == theirs.shape()
    assert len(ours.collectives) >= 2 * len(plan.groups) - 1  # frozen groups are not reduced
