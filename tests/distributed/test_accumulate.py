"""Gradient accumulation: every mode gives the single-process sum, and communicates when it says it does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import compat
from shardwise.errors import ConfigError
from shardwise.training.step import AccumulationMode, accumulate
from tests.by_hand import (
    Tiny,
    assert_same,
    full_gradients,
    loss_of,
    mesh_1d,
    mesh_2d,
    shard_by_hand,
    shard_module,
    tiny,
    tokens,
)
from tests.ranks import ranks

pytestmark = pytest.mark.torch

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MIXED = {"atol": 3e-3, "rtol": 3e-2}  # bf16 compute against bf16 compute, in another order


class Collectives(TorchDispatchMode):
    """Counts reduce-scatters and all-reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce_scatters = self.all_reduces = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reduce_scatters += "reduce_scatter" in str(func)
        self.all_reduces += "allreduce" in str(func) or "all_reduce" in str(func)
        return func(*args, **(kwargs or {}))


def reference(model: Tiny, num_ranks: int, skips: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The sum over micro-steps of the mean over ranks, in one process."""
    model = copy.deepcopy(model)
    for step, skip in enumerate(skips):
        for rank in range(num_ranks):
            (loss_of(model, tokens(rank, step), skip=skip) / num_ranks).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def run(model: Tiny, rank: int, mode: AccumulationMode, skips: list[tuple[int, ...]]) -> list[tuple[int, int]]:
    """Accumulate, and return how many (reduce-scatters, all-reduces) each micro-step made."""
    counts = []
    for step, skip in enumerate(skips):
        with Collectives() as collectives, accumulate(model, step, len(skips), mode):
            loss_of(model, tokens(rank, step), skip=skip).backward()
        counts.append((collectives.reduce_scatters, collectives.all_reduces))
    return counts


@ranks(2)
@pytest.mark.parametrize("mode", ["comm", "memory", "hsdp"])
def test_gradients_equal_single_process_on_one_axis(rank: int, mode: AccumulationMode):
    reference_model = tiny()
    model = shard_by_hand(reference_model, mesh_1d(2))
    counts = run(model, rank, mode, [()] * 3)
    assert_same(full_gradients(model), reference(reference_model, 2, [()] * 3))
    assert counts == ([(0, 0), (0, 0), (3, 0)] if mode == "comm" else [(3, 0)] * 3)


@ranks(4)
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("comm", [(0, 0), (0, 0), (3, 3)]),
        ("memory", [(3, 3), (3, 3), (3, 3)]),
        ("hsdp", [(3, 0), (3, 0), (3, 3)]),
    ],
)
def test_gradients_equal_single_process_on_two_axes(rank: int, mode: AccumulationMode, expected: list[tuple[int, int]]):
    reference_model = tiny()
    model = shard_by_hand(reference_model, mesh_2d())
    assert run(model, rank, mode, [()] * 3) == expected
    assert_same(full_gradients(model), reference(reference_model, 4, [()] * 3))


@ranks(4)
@pytest.mark.parametrize("mode", ["comm", "memory", "hsdp"])
@pytest.mark.parametrize(
    "skips",
    [[(), (1,), (0,)], [(0,), (), (1,)], [(0, 1), (0,), ()], [(), (), (0, 1)]],
    ids=["one-each", "late-first", "growing", "none-last"],
)
def test_blocks_unused_in_some_micro_steps_still_add_up(
    rank: int, mode: AccumulationMode, skips: list[tuple[int, ...]]
):
    """HSDP's partial sums are lost or misplaced without our mending."""
    reference_model = tiny()
    model = shard_by_hand(reference_model, mesh_2d())
    for _ in range(2):  # nothing may be left over for the second step
        model.zero_grad()
        run(model, rank, mode, skips)
        assert_same(full_gradients(model), reference(reference_model, 4, skips))


class TwoPaths(nn.Module):
    """Both paths in one group; a micro-step takes one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.both = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, path: str) -> torch.Tensor:
        return self.both(getattr(self, path)(x)).sum()


@ranks(4)
@pytest.mark.parametrize("mode", ["comm", "memory", "hsdp"])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("paths", ["left right", "right left left", "left left"])
def test_parameters_of_one_group_may_come_and_go(
    rank: int, mode: AccumulationMode, policy: MixedPrecisionPolicy, paths: str
):
    """Under bf16 torch fails with 'expects uniform gradient dtype' (pytorch#196996) if one comes late."""
    torch.manual_seed(0)
    reference_model = TwoPaths()
    model = shard_module(copy.deepcopy(reference_model), mesh_2d(), mp_policy=policy)
    inputs = torch.randn(4, 3, 5)
    order = paths.split()
    for step, path in enumerate(order):
        with accumulate(model, step, len(order), mode):
            model(inputs[rank] * (step + 1), path).backward()
        for other in range(4):
            (reference_model(inputs[other] * (step + 1), path) / 4).backward()
    expected = {n: p.grad for n, p in reference_model.named_parameters() if p.grad is not None}
    tolerance = {} if policy.param_dtype is None else {"atol": 0.05, "rtol": 0.02}
    assert_same(full_gradients(model), expected, **tolerance)


@ranks(2)
def test_group_never_used_does_not_fail_without_sync(rank: int):
    """Unmended torch raises AttributeError '_unsharded_param' here."""
    model = shard_by_hand(tiny(), mesh_1d(2), mp_policy=BF16)
    run(model, rank, "comm", [(1,), (1,)])
    assert model.blocks[1].up.weight.grad is None
    assert model.blocks[0].up.weight.grad is not None


@ranks(2)
def test_switches_are_restored_after_an_exception_and_when_nested(rank: int):
    model = shard_by_hand(tiny(), mesh_1d(2))
    expected = reference(tiny(), 2, [()])
    with pytest.raises(ZeroDivisionError), accumulate(model, 0, 2):
        raise ZeroDivisionError
    assert compat.fsdp_state(model)._state_ctx.is_last_backward, "else nobody waits for the reductions"
    with accumulate(model, 0, 2), accumulate(model, 1, 2):
        loss_of(model, tokens(rank)).backward()  # the inner, last micro-step reduces
    assert_same(full_gradients(model), expected)
    model.zero_grad()
    with accumulate(model, 0, 2):
        with accumulate(model, 0, 1):
            pass
        loss_of(model, tokens(rank)).backward()
        assert full_gradients(model) == {}, "the outer setting holds again after the inner block"
    with accumulate(model, 1, 2):
        loss_of(model, tokens(rank)).backward()
    doubled = {name: 2 * grad for name, grad in expected.items()}
    assert_same(full_gradients(model), doubled)


@ranks(2)
def test_first_micro_step_may_be_the_first_forward_ever(rank: int):
    """FSDP2 shares its switches between groups only from the first forward on."""
    model = shard_by_hand(tiny(), mesh_1d(2))
    assert run(model, rank, "comm", [(), ()]) == [(0, 0), (3, 0)]
    assert run(model, rank, "comm", [()]) == [(3, 0)]


def test_plain_model_accumulates_by_itself():
    model = tiny()
    for step in range(2):
        with accumulate(model, step, 2):
            loss_of(model, tokens(0, step)).backward()
    assert_same(full_gradients(model), reference(tiny(), 1, [(), ()]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 2), "micro_step is 2 of 2"),
        ((-1, 2), "micro_step is -1 of 2"),
        ((0, 0), "num_micro_steps is 0"),
        ((0, True), "num_micro_steps is True"),
        ((0.0, 2), "micro_step is 0.0"),
        ((0, 2, "fast"), "mode is 'fast'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple, message: str):
    with pytest.raises(ConfigError, match=message), accumulate(nn.Linear(1, 1), *arguments):
        pass
