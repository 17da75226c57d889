"""`zero_grad` of a sharded model clears what it clears on one process, also between forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from shardwise.config.schema import ShardConfig
from shardwise.training.step import AccumulationMode, accumulate
from tests.by_hand import (
    assert_same,
    full,
    full_gradients,
    loss_of,
    mesh_2d,
    reference_gradients,
    shard_by_hand,
    tiny,
    tokens,
)
from tests.ranks import ranks

pytestmark = pytest.mark.torch

Clear = Callable[[nn.Module], object]


def mesh_1d() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


def train(model: nn.Module, batches: list[list[torch.Tensor]], clear: Clear) -> dict[str, torch.Tensor]:
    """Parameters after one step a list of batches; gradients are cleared between forward and backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in batches:
        loss = torch.stack([loss_of(model, batch) for batch in step]).mean()
        clear(model)
        loss.backward()
        optimizer.step()
    return {name: full(p).detach() for name, p in model.named_parameters()}


CLEARED: dict[str, Clear] = {
    "none": lambda model: model.zero_grad(),
    "zeros": lambda model: model.zero_grad(set_to_none=False),
    "wrapper": lambda model: nn.ModuleList([model]).zero_grad(),
    "modules": lambda model: [module.zero_grad() for module in model.modules()],
}


@ranks(2)
@pytest.mark.parametrize("how", CLEARED)
@pytest.mark.parametrize("reshard", [None, False])
def test_four_steps_equal_one_process(rank: int, how: str, reshard: Any):
    model = sw.shard(tiny(), ShardConfig(reshard_after_forward=reshard), mesh=mesh_1d())
    ours = train(model, [[tokens(rank, step)] for step in range(4)], CLEARED[how])
    whole = train(tiny(), [[tokens(other, step) for other in range(2)] for step in range(4)], CLEARED[how])
    assert_same(ours, whole)


@ranks(2)
def test_torch_alone_adds_the_gradients_up(rank: int):
    """Why `zero_grad` is changed; where this fails, torch has begun to do it."""
    model = shard_by_hand(tiny(), mesh_1d())
    theirs = train(model, [[tokens(rank, step)] for step in range(4)], CLEARED["none"])
    whole = train(tiny(), [[tokens(other, step) for other in range(2)] for step in range(4)], CLEARED["none"])
    with pytest.raises(AssertionError):
        assert_same(theirs, whole)


@ranks(2)
@pytest.mark.parametrize("part", ["head", "blocks.0", "blocks.1.norm", "embedding", "frozen"])
@pytest.mark.parametrize("after_forward", [True, False])
def test_a_part_clears_its_own_parameters_only(rank: int, part: str, after_forward: bool):
    """`head` is in the root's group and tied to the embedding; a norm is in the group of its block."""
    model = sw.shard(tiny(), mesh=mesh_1d())
    loss_of(model, tokens(rank)).backward()
    whole = tiny()
    for other in range(2):
        (loss_of(whole, tokens(other)) / 2).backward()
    whole.get_submodule(part).zero_grad()
    loss = loss_of(model, tokens(rank, 1)) if after_forward else torch.zeros((), requires_grad=True)
    model.get_submodule(part).zero_grad()
    model.reshard()
    assert_same(full_gradients(model), {n: p.grad for n, p in whole.named_parameters() if p.grad is not None})
    loss.backward()


@ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("reduce_dtype", ["storage", "float64"])
def test_unreduced_gradients_are_cleared_and_later_ones_kept(rank: int, set_to_none: bool, reduce_dtype: Any):
    model = sw.shard(tiny(), ShardConfig(precision=sw.PrecisionConfig(reduce_dtype=reduce_dtype)), mesh=mesh_1d())
    accumulated(model, rank, 2, "comm", lambda: model.zero_grad(set_to_none=set_to_none))
    expected = reference_gradients(tiny(), [tokens(other, step) for other in range(2) for step in (1, 2)])
    assert_same(full_gradients(model), {name: 2 * gradient for name, gradient in expected.items()})


@ranks(4)
@pytest.mark.parametrize("mode", ["comm", "memory", "hsdp"])
@pytest.mark.parametrize("part", ["", "head", "blocks.0.up"])
def test_partial_sums_of_replicas_are_cleared_for_the_part(rank: int, mode: AccumulationMode, part: str):
    model = sw.shard(tiny(), mesh=mesh_2d())
    accumulated(model, rank, 2, mode, lambda: model.get_submodule(part).zero_grad())
    whole = tiny()
    for step in range(3):
        for other in range(4):
            (loss_of(whole, tokens(other, step)) / 4).backward()
        if step == 0:
            whole.get_submodule(part).zero_grad()
    assert_same(full_gradients(model), {n: p.grad for n, p in whole.named_parameters() if p.grad is not None})


def accumulated(model: nn.Module, rank: int, last: int, mode: AccumulationMode, clear: Callable[[], None]) -> None:
    """Gradients of micro-steps 0 to `last`, cleared after the first."""
    for step in range(last + 1):
        with accumulate(model, step, last + 1, mode):
            loss = loss_of(model, tokens(rank, step))
            if step == 1:
                clear()
            loss.backward()


@ranks(2)
def test_other_models_keep_their_gradients(rank: int):
    first, second = (sw.shard(tiny(), mesh=mesh_1d()) for _ in range(2))
    plain = copy.deepcopy(tiny())
    for model in (first, second, plain):
        loss_of(model, tokens(rank)).backward()
    before = full_gradients(second)
    first.zero_grad()
    plain.zero_grad()
    assert full_gradients(first) == full_gradients(plain) == {}
    assert_same(full_gradients(second), before)
