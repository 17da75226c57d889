"""A policy picks the same modules in a rewritten program as FSDP1 wraps, whatever the sizes in the model."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from tests.ranks import ranks
from tests.rules.moving.test_same_numbers import migrated, run

PROGRAM = """
import functools
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


def wrap(model, size):
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=size)
    return FSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
"""
IGNORING = PROGRAM.replace("policy, device_id", "policy, ignored_modules=[model.last], device_id")
NUM_MODELS = 12


class Tree(nn.Module):
    """A weight of its own, and children: what the children take is not counted for the parent again."""

    def __init__(self, dice: random.Random, depth: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dice.randint(1, 30)))
        num_children = dice.randint(1, 3) if depth else 0
        self.inner = nn.ModuleDict({str(i): Tree(dice, depth - 1) for i in range(num_children)})
        self.last = nn.Linear(dice.randint(1, 9), dice.randint(1, 9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((one(x) for one in self.inner.values()), x * self.weight.sum() + self.last.weight.sum())


def units(text: str, seed: int, size: int) -> set[str]:
    wrapped = run(text)["wrap"](Tree(random.Random(seed), depth=3), size)
    names = {name for name, module in wrapped.named_modules() if isinstance(module, FSDP | FSDPModule)}
    return {name.replace("_fsdp_wrapped_module", "").replace("..", ".").strip(".") for name in names}


@pytest.mark.parametrize(("program", "target"), [(PROGRAM, "torch"), (PROGRAM, "shardwise"), (IGNORING, "torch")])
@ranks(2)
def test_units_of_a_size_are_those_of_fsdp1(rank: int, program: str, target: str):
    text = migrated(program, target)
    num_units = set()
    for seed in range(NUM_MODELS):
        size = 20 + 15 * (seed % 6)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP1 warns about the CPU and about being old
            expected = units(program, seed, size)
        assert units(text, seed, size) == expected, (seed, size)
        num_units.add(len(expected))
    assert len(num_units) > 3  # the models do differ


class Normed(nn.Module):
    """BatchNorm in a module too small for the policy to look into; FSDP1 finds it there under mixed precision."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(20, 20)
        self.small = nn.Sequential(nn.Linear(20, 2), nn.BatchNorm1d(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(self.large(x))


PRECISE = PROGRAM.replace(
    "device_id=", "mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16), device_id="
).replace("import FullyShardedDataParallel as FSDP", "import FullyShardedDataParallel as FSDP, MixedPrecision")


@pytest.mark.parametrize("target", ["torch", "shardwise"])
@ranks(2)
def test_batch_norm_is_a_unit_in_full_precision_wherever_it_stands(rank: int, target: str):
    def wrapped(text: str) -> nn.Module:
        torch.manual_seed(0)
        return run(text)["wrap"](Normed(), 100)

    def weight_dtype(model: nn.Module) -> torch.dtype:
        norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm1d))
        seen = []
        norm.register_forward_hook(lambda module, args, output: seen.append(module.weight.dtype))
        model(torch.ones(4, 20))
        return seen[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert weight_dtype(wrapped(PRECISE)) is torch.float32
    assert weight_dtype(wrapped(migrated(PRECISE, target))) is torch.float32
