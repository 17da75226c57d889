"""Rewritten programs train as the FSDP1 programs they come from: real FSDP1 beside real FSDP2, on gloo ranks."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

from shardwise.fsdp1.codemod.program import Program
from shardwise.fsdp1.codemod.rewriting import rewrite
from tests.ranks import ranks
from tests.rules.moving.programs import BODIES, source
from tests.rules.moving.toys import Toy

_LOW = ("mixed_precision", "reduce_left_out", "precision_at_run_time")


def migrated(text: str, target: str) -> str:
    program = Program({"toy.py": text})
    new, notes = rewrite(program.file("toy.py"), program, target)
    assert [note.status.value for note in notes if note.code == "SW101"] == ["rewritten"], notes
    return new


def run(text: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "toy"}
    exec(compile(text, "toy.py", "exec", dont_inherit=True), space)
    return space


def train(model: nn.Module, rank: int) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(3):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(batch).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model):
            return {
                name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in model.named_parameters()
            }
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def compare(name: str, rank: int, target: str, *, with_norm: bool = False) -> None:
    torch.manual_seed(0)
    model = Toy(with_norm=with_norm)
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 warns about CPU, NO_SHARD, BatchNorm and itself
        before = run(source(name))["wrap"](model)
        losses = train(before, rank)
        parameters = whole(before)
    after = run(migrated(source(name), target))["wrap"](twin)
    # bfloat16 keeps 8 bits; reductions in another order differ in the last one.
    tolerance = 2e-2 if name in _LOW else 1e-5
    torch.testing.assert_close(train(after, rank), losses, rtol=tolerance, atol=tolerance / 10)
    found = whole(after)
    assert parameters.keys() == found.keys()
    for key, value in parameters.items():
        torch.testing.assert_close(found[key], value.to(found[key].dtype), rtol=tolerance, atol=tolerance / 10, msg=key)


@pytest.mark.parametrize("target", ["torch", "shardwise"])
@pytest.mark.parametrize("name", [one for one in BODIES if "hybrid" not in one])
@ranks(2)
def test_rewritten_program_trains_as_fsdp1_does(rank: int, name: str, target: str):
    compare(name, rank, target)


@pytest.mark.parametrize("target", ["torch", "shardwise"])
@pytest.mark.parametrize("name", [one for one in BODIES if "hybrid" in one])
@ranks(4)
def test_rewritten_hybrid_program_trains_as_fsdp1_does(rank: int, name: str, target: str):
    compare(name, rank, target)


@ranks(2)
def test_batch_norm_stays_out_of_mixed_precision(rank: int):
    compare("mixed_precision", rank, "torch", with_norm=True)


SYNCED = """
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from tests.rules.moving.toys import Block


def wrap(model):
    policy = ModuleWrapPolicy({Block})
    return FSDP(model, auto_wrap_policy=policy, sync_module_states=True, device_id=torch.device("cpu"))
"""


@pytest.mark.parametrize("target", ["torch", "shardwise"])
@ranks(2)
def test_every_rank_gets_the_first_ranks_values(rank: int, target: str):
    """FSDP1 itself refuses to send CPU tensors, so what it promises is checked instead."""
    torch.manual_seed(0)
    expected = Toy()
    torch.manual_seed(rank)
    model = run(migrated(SYNCED, target))["wrap"](Toy())
    for name, value in whole(model).items():
        torch.testing.assert_close(value, expected.get_parameter(name).detach(), msg=name)


AFTER_FORWARD = """
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def train(model, rank):
    model = FSDP(model, device_id=torch.device("cpu"))
    losses = []
    for epoch in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * epoch + step + rank))
            loss = model(batch).pow(2).mean()
            model.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            model(batch)
    return losses
"""


@ranks(2)
def test_what_a_forward_leaves_unsharded_trains_as_with_fsdp1(rank: int):
    torch.manual_seed(0)
    model = Toy()
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = run(AFTER_FORWARD)["train"](model, rank)
    assert run(migrated(AFTER_FORWARD, "torch"))["train"](twin, rank) == pytest.approx(losses, rel=1e-5)
