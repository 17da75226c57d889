"""Rewritten checkpoint code hands out and takes in the same state as FSDP1's: values, places and ranks."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from shardwise.findings import Status
from shardwise.fsdp1.codemod.program import Program
from shardwise.fsdp1.codemod.rewriting import rewrite
from tests.ranks import ranks
from tests.rules.moving.state_programs import HEADER, LOAD_FULL, PROGRAMS, source
from tests.rules.moving.toys import Block, Toy


@functools.cache
def migrated(name: str) -> str:
    program = Program({"states.py": source(name)})
    text, notes = rewrite(program.file("states.py"), program, "torch")
    assert {note.status for note in notes if note.code != "SW133"} == {Status.REWRITTEN}, notes  # wrapped by the test
    return text


def run(text: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "states"}
    exec(compile(text, "states.py", "exec", dont_inherit=True), space)
    return space


# Real FSDP1 without a GPU crashes when a state dict is offloaded, and with use_orig_params it gathers all optimizer
# states into one buffer. So it is asked in the one way that works, and each program says on which ranks it wants what.
REFERENCE = """
def save(model, optimizer):
    kind, config = StateDictType.FULL_STATE_DICT, FullOptimStateDictConfig(offload_to_cpu=False)
    with FSDP.state_dict_type(model, kind, None, config):
        return model.state_dict(), FSDP.optim_state_dict(model, optimizer)
"""
ON_RANK_ZERO = {
    "rank_zero_on_cpu": (True, True),
    "rank_zero_in_place": (True, True),
    "older_calls": (False, True),
    "known_at_run_time": (True, True),
}


def fsdp1(model: nn.Module) -> nn.Module:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"))


def fsdp2(model: nn.Module) -> nn.Module:
    for block in model.get_submodule("blocks").children():
        fully_shard(block)
    return fully_shard(model)


def trained(model: nn.Module, rank: int, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, optimizer, rank, steps)
    return optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> float:
    loss = torch.zeros(())
    for step in range(steps):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def equal(found: Any, expected: Any) -> None:
    """Equal in structure and values."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            equal(found[key], value)
    elif isinstance(expected, torch.Tensor):
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, expected.detach().reshape(found.shape), rtol=1e-5, atol=1e-6)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            equal(one, other)


@pytest.mark.parametrize("name", PROGRAMS)
@ranks(2)
def test_states_are_those_of_fsdp1(rank: int, name: str):
    torch.manual_seed(0)
    model = Toy()
    twin, other, fresh = copy.deepcopy(model), Toy(), Toy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 warns about the CPU, and about being old
        reference, first = run(HEADER + REFERENCE + LOAD_FULL), fsdp1(model)
        optimizer = trained(first, rank)
        states = reference["save"](first, optimizer)
        resumed = fsdp1(other)
        its_optimizer = trained(resumed, rank, steps=1)
        reference["load"](resumed, its_optimizer, *copy.deepcopy(states))
        loss = train(resumed, its_optimizer, rank, 2)

    after, sharded = run(migrated(name)), fsdp2(twin)
    sharded_optimizer = trained(sharded, rank)
    with torch.no_grad():
        sharded(torch.zeros(1, 8))  # an evaluation leaves the root unsharded
    found = after["save"](sharded, sharded_optimizer)
    for mine, real, only_rank_zero in zip(found, states, ON_RANK_ZERO.get(name, (False, False)), strict=True):
        if only_rank_zero and rank:
            assert mine == {}
        else:
            equal(mine.get("state", mine), real.get("state", real))
    again = fsdp2(fresh)
    again_optimizer = trained(again, rank, steps=1)
    after["load"](again, again_optimizer, *copy.deepcopy(found))
    assert train(again, again_optimizer, rank, 2) == pytest.approx(loss, rel=1e-4)
