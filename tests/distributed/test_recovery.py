"""After a step that raised on every rank, the next step trains as if the failed one had not been."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

from shardwise.errors import ShardError
from shardwise.sharding.apply import shard
from shardwise.sharding.registry import recover
from shardwise.training.step import AccumulationMode, accumulate
from tests.by_hand import (
    Tiny,
    assert_same,
    full_gradients,
    loss_of,
    mesh_1d,
    mesh_2d,
    reference_gradients,
    shard_by_hand,
    tiny,
    tokens,
)
from tests.ranks import ranks


class Fuse(torch.autograd.Function):
    """Blows in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        raise FloatingPointError("in backward")


def fail_in_forward(model: Tiny, rank: int) -> None:
    def fail(*_: object) -> None:
        raise FloatingPointError("in forward")

    handle = model.blocks[1].norm.register_forward_pre_hook(fail)
    try:
        loss_of(model, tokens(rank, 9))
    finally:
        handle.remove()


def fail_in_backward(model: Tiny, rank: int) -> None:
    """Blows between the blocks: block 1 is reduced by then, block 0 and the root are gathered."""
    handle = model.blocks[0].register_forward_hook(lambda module, args, output: Fuse.apply(output))
    try:
        loss_of(model, tokens(rank, 9)).backward()
    finally:
        handle.remove()


FAILURES = {"forward": fail_in_forward, "backward": fail_in_backward}


def next_step_is_right(model: Tiny, rank: int, num_ranks: int) -> None:
    for _ in range(2):
        model.zero_grad()
        loss_of(model, tokens(rank)).backward()
        expected = reference_gradients(tiny(), [tokens(other) for other in range(num_ranks)])
        assert_same(full_gradients(model), expected)


@ranks(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("settings", ["plain", "reshard-int", "offload"])
@pytest.mark.parametrize("num_good_steps", [0, 1])
def test_next_step_works(rank: int, where: str, settings: str, num_good_steps: int):
    chosen = {
        "plain": {},
        "reshard-int": {"reshard_after_forward": 2},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    }[settings]
    model = shard_by_hand(tiny(), mesh_1d(2), **chosen)
    for _ in range(num_good_steps):
        loss_of(model, tokens(rank, 5)).backward()
    with pytest.raises(FloatingPointError):
        FAILURES[where](model, rank)
    recover(model)
    assert all(p.grad is None for p in model.parameters())
    assert all(p.__class__.__name__ != "Parameter" or hasattr(p, "placements") for p in model.parameters())
    next_step_is_right(model, rank, 2)


@ranks(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failed_step_keeps_no_activations(rank: int, where: str):
    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.activation = x.clone()
            made.append(weakref.ref(ctx.activation))
            return ctx.activation.clone()

        @staticmethod
        def backward(ctx, *grads):
            return grads[0]

    made: list[weakref.ref] = []
    model = shard(tiny(), mesh=mesh_1d(2))
    model.blocks[0].norm.register_forward_hook(lambda module, args, output: Kept.apply(output))
    with contextlib.suppress(FloatingPointError):
        FAILURES[where](model, rank)
    recover(model)
    gc.collect()
    assert [activation() for activation in made] == [None]


@ranks(4)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("mode", ["comm", "memory", "hsdp"])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
def test_gradients_of_earlier_micro_steps_are_dropped_too(
    rank: int, where: str, mode: AccumulationMode, reduce_dtype: torch.dtype | None
):
    """Unreduced gradients, widened or not, and HSDP's partial sums are nowhere zero_grad would look."""
    model = shard_by_hand(tiny(), mesh_2d(), mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    with accumulate(model, 0, 3, mode):
        loss_of(model, tokens(rank, 7)).backward()
    with pytest.raises(FloatingPointError), accumulate(model, 1, 3, mode):
        FAILURES[where](model, rank)
    recover(model)
    next_step_is_right(model, rank, 4)


@ranks(4)
@pytest.mark.parametrize("mode", ["comm", "memory", "hsdp"])
def test_a_forward_that_raises_leaves_the_gradients_of_earlier_micro_steps(rank: int, mode: AccumulationMode):
    """As in one process: a bad batch that a script skips takes nothing away."""
    model = shard(tiny(), mesh=mesh_2d())
    with accumulate(model, 0, 2, mode):
        loss_of(model, tokens(rank, 7)).backward()
        with pytest.raises(FloatingPointError):
            fail_in_forward(model, rank)
        with pytest.raises(FloatingPointError), torch.no_grad():
            fail_in_forward(model, rank)
    with accumulate(model, 1, 2, mode):
        loss_of(model, tokens(rank)).backward()
    first, second = (reference_gradients(tiny(), [tokens(other, step) for other in range(4)]) for step in (7, 0))
    assert_same(full_gradients(model), {name: first[name] + second[name] for name in first})


@ranks(2)
def test_root_inside_a_plain_module_is_found_and_a_part_is_refused(rank: int):
    model = shard_by_hand(tiny(), mesh_1d(2))
    with pytest.raises(FloatingPointError):
        fail_in_backward(model, rank)
    with pytest.raises(ShardError, match="was given a submodule"):
        recover(model.blocks[0])
    recover(nn.ModuleList([model, nn.Linear(1, 1)]))
    next_step_is_right(model, rank, 2)


@ranks(2)
def test_unstarted_and_healthy_models_are_left_in_order(rank: int):
    model = shard_by_hand(tiny(), mesh_1d(2))
    assert isinstance(model, FSDPModule)
    model.unshard()
    recover(model)
    next_step_is_right(model, rank, 2)
    recover(model)
    next_step_is_right(model, rank, 2)


def test_plain_model_loses_its_gradients():
    model = nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    recover(model)
    assert model.weight.grad is None
