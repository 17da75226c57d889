"""memory_breakdown(): every kind of memory is counted, when it is there and only then."""

import torch
from torch import nn

import shardwise as sw
from shardwise.sharding.hooks.error_notes import annotate, memory_breakdown
from tests.ranks import ranks

FLOAT = 4


def sizes(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, int]:
    return {holding.what.partition(" of ")[0]: holding.num_bytes for holding in memory_breakdown(model, optimizers)}


@ranks(2)
def test_memory_is_told_by_kind(rank: int):
    torch.manual_seed(0)
    config = sw.ShardConfig(reshard_after_forward=False)
    model = sw.shard(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)), config)
    optimizer = torch.optim.AdamW(model.parameters())
    shards = 2 * 8 * 8 * FLOAT // 2
    assert sizes(model, optimizer) == {"parameters (shards)": shards}
    loss = model(torch.ones(2, 8)).sum()
    assert sizes(model, optimizer)["gathered parameters"] == 2 * shards
    loss.backward()
    optimizer.step()
    steps = 2 * FLOAT  # a scalar a parameter
    assert sizes(model, optimizer) == {
        "parameters (shards)": shards,
        "gradients (shards)": shards,
        "optimizer state": 2 * shards + steps,
    }


@ranks(2)
def test_running_out_of_memory_is_told_with_what_to_change(rank: int):
    torch.manual_seed(0)
    model = sw.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    annotate(error, model)
    (note,) = error.__notes__
    assert "SW599" in note
    assert "parameters (shards) -> more ranks" in note
    assert "optimizer state ->" not in note

    optimizer = torch.optim.AdamW(model.parameters())
    other = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    other.step()
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    annotate(error, model)
    assert "optimizer state -> more ranks, or 8-bit states" in error.__notes__[0]
