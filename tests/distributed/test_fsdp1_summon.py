"""summon_full_params and apply of shardwise.fsdp1, against FSDP1 where FSDP1 can do it without a GPU."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from shardwise.errors import ConfigError
from shardwise.fsdp1 import FullyShardedDataParallel as FSDP
from tests.by_hand import Block, assert_same, loss_of, tiny, tokens
from tests.fsdp1_pairs import OURS, both, full_state, model_for, wrapped
from tests.ranks import ranks

BLOCKS = ModuleWrapPolicy({Block})


@pytest.mark.parametrize("writeback", [False, True])
@pytest.mark.parametrize("recurse", [False, True])
@ranks(2)
def test_whole_parameters_are_shown_and_written_back_as_in_fsdp1(rank: int, recurse: bool, writeback: bool):
    def run(api: Any) -> Any:
        unit = wrapped(api, model_for(api), auto_wrap_policy=BLOCKS, use_orig_params=True)
        with api.FullyShardedDataParallel.summon_full_params(unit, recurse=recurse, writeback=writeback):
            shapes = {name: tuple(p.shape) for name, p in unit.named_parameters() if recurse or "blocks" not in name}
            with torch.no_grad():
                for name, parameter in unit.named_parameters():
                    if recurse or "blocks" not in name:
                        parameter.add_(1.0)
        return shapes, full_state(api, unit)

    real, ours = both(run)
    assert ours[0] == real[0]
    assert_same(ours[1], real[1])


@ranks(2)
def test_gradients_are_whole_too_and_written_back(rank: int):
    def run(api: Any) -> Any:
        unit = wrapped(api, model_for(api), auto_wrap_policy=BLOCKS, use_orig_params=True)
        optimizer = torch.optim.SGD(unit.parameters(), lr=0.1)
        loss_of(unit, tokens(rank)).backward()
        with api.FullyShardedDataParallel.summon_full_params(unit, with_grads=True):
            grads = {name: p.grad.clone() for name, p in unit.named_parameters()}
            for parameter in unit.parameters():
                parameter.grad.mul_(2.0)
        optimizer.step()
        return grads, full_state(api, unit)

    real, ours = both(run)
    assert_same(ours[0], real[0])
    assert_same(ours[1], real[1])


@ranks(2)
def test_rank0_only_shows_values_on_rank_zero(rank: int):
    unit = FSDP(tiny(), auto_wrap_policy=BLOCKS)
    with FSDP.summon_full_params(unit, writeback=False, rank0_only=True, offload_to_cpu=True):
        assert all(parameter.is_meta == (rank > 0) for parameter in unit.parameters())
    with pytest.raises(ConfigError, match="rank0_only"), FSDP.summon_full_params(unit, rank0_only=True):
        pass


class Generates(nn.Module):
    """Called by a method that is not `forward`, as language models are."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(batch)

    def generate(self, batch: torch.Tensor, num: int = 3) -> torch.Tensor:
        for _ in range(num):
            batch = torch.cat([batch, self(batch)[:, -1:].argmax(-1)], 1)
        return batch


@pytest.mark.parametrize("ran_before", [False, True])
@pytest.mark.parametrize("recurse", [False, True])
@ranks(2)
def test_generation_runs_on_whole_parameters(rank: int, recurse: bool, ran_before: bool):
    """With `recurse=False` inner units gather their own; scripts do both."""
    unit = FSDP(Generates(), auto_wrap_policy=BLOCKS)
    if ran_before:
        loss_of(unit, tokens(rank)).backward()
    with torch.no_grad(), FSDP.summon_full_params(unit, writeback=False, recurse=recurse):
        generated = unit.generate(tokens(rank))
    assert torch.equal(generated, Generates().generate(tokens(rank)))
    loss_of(unit, tokens(rank)).backward()
    assert all(isinstance(parameter, DTensor) for parameter in unit.parameters())


@ranks(2)
def test_a_module_around_units_is_summoned_as_a_whole(rank: int):
    holder = nn.ModuleDict(
        {"a": FSDP(tiny(), auto_wrap_policy=BLOCKS), "b": FSDP(nn.Linear(3, 3)), "c": nn.Linear(3, 3)}
    )
    with FSDP.summon_full_params(holder):
        assert not any(isinstance(parameter, DTensor) for parameter in holder.parameters())
    assert any(isinstance(parameter, DTensor) for parameter in holder.parameters())


def fill(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)


@ranks(2)
def test_apply_initialises_whole_parameters_as_fsdp1_does(rank: int):
    def run(api: Any) -> Any:
        unit = wrapped(api, model_for(api), auto_wrap_policy=BLOCKS, use_orig_params=True)
        torch.manual_seed(7)
        assert unit.apply(fill) is unit
        return full_state(api, unit)

    real, ours = both(run)
    assert_same(ours, real)


@ranks(2)
def test_changes_are_dropped_when_the_block_raises(rank: int):
    unit = wrapped(OURS, tiny(), auto_wrap_policy=BLOCKS)
    before = full_state(OURS, unit)

    def change() -> None:
        with FSDP.summon_full_params(unit), torch.no_grad():
            unit.gain.add_(1.0)
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        change()
    assert not unit.is_summoned
    assert_same(full_state(OURS, unit), before)
