"""A sharded average equals the single-process one, swaps with the parameters, and survives a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from shardwise.errors import CheckpointError, ConfigError, ShardError
from shardwise.training.ema import EMA
from tests.by_hand import (
    Tiny,
    assert_same,
    full,
    loss_of,
    mesh_1d,
    mesh_2d,
    shard_by_hand,
    shard_module,
    tiny,
    tokens,
)
from tests.ranks import ranks


def trainable(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def full_parameters(model: Tiny) -> dict[str, torch.Tensor]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {name: full(p.detach()) for name, p in model.named_parameters()}


def averages(ema: EMA) -> dict[str, torch.Tensor]:
    return {name: full(tensor) for name, tensor in ema.state_dict()["shadow"].items()}


def step(model: Tiny, rank: int, index: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.zero_grad()
    loss_of(model, tokens(rank, index)).backward()
    optimizer.step()


@ranks(4)
@pytest.mark.parametrize("decay", [0.9, None], ids=["constant", "schedule"])
def test_average_equals_that_of_one_process(rank: int, decay: float | None):
    reference, average = tiny(), trainable(tiny())
    model = shard_by_hand(reference, mesh_2d())
    schedule = decay if decay is not None else (lambda num_updates: min(0.9, (1 + num_updates) / 5))
    ema = EMA(model, schedule)
    for index in range(4):
        step(model, rank, index)
        ema.update()
        rate = 0.9 if decay is not None else min(0.9, (1 + index) / 5)
        current = full_parameters(model)
        average = {name: rate * old + (1 - rate) * current[name] for name, old in average.items()}
    assert ema.num_updates == 4
    assert_same(averages(ema), average, atol=1e-6, rtol=1e-6)


@ranks(2)
def test_only_local_shards_are_held(rank: int):
    model = shard_by_hand(tiny(), mesh_1d(2))
    shadow = EMA(model, 0.9).state_dict()["shadow"]
    assert "frozen.weight" not in shadow
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert isinstance(parameter, DTensor)
            assert isinstance(shadow[name], DTensor)
            assert shadow[name].placements == parameter.placements
            assert shadow[name].to_local().shape == parameter.to_local().shape


@ranks(2)
def test_swap_evaluates_the_average_and_restores_on_exceptions(rank: int):
    reference = tiny()
    model = shard_by_hand(reference, mesh_1d(2))
    ema = EMA(model, 0.5)
    step(model, rank, 0)
    ema.update()
    before, average = full_parameters(model), averages(ema)
    reference.load_state_dict({**reference.state_dict(), **average, "head.weight": average["embedding.weight"]})

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            return model(tokens(0))  # leaves the root gathered, with whatever weights it had

    trained = evaluate()
    with pytest.raises(ZeroDivisionError), ema.swap():  # noqa: PT012
        torch.testing.assert_close(evaluate(), reference(tokens(0)))
        raise ZeroDivisionError
    torch.testing.assert_close(evaluate(), trained, atol=0, rtol=0)
    assert_same(full_parameters(model), before, atol=0, rtol=0)
    assert_same(averages(ema), average, atol=0, rtol=0)


@ranks(2)
def test_update_uses_the_shards_though_the_root_stands_gathered(rank: int):
    model = shard_by_hand(tiny(), mesh_1d(2))
    ema = EMA(model, 0.0)
    step(model, rank, 0)
    with torch.no_grad():
        model(tokens(rank))
    ema.update()
    after = full_parameters(model)
    assert_same(averages(ema), {name: after[name] for name in averages(ema)}, atol=0, rtol=0)


@ranks(2)
def test_update_and_swap_inside_swap_are_refused(rank: int):
    ema = EMA(shard_by_hand(tiny(), mesh_1d(2)), 0.9)
    with ema.swap():
        with pytest.raises(ShardError, match=r"EMA\.update was called"):
            ema.update()
        with pytest.raises(ShardError, match=r"EMA\.swap was called"), ema.swap():
            pass
    ema.update()


@ranks(2)
def test_average_of_sixteen_bit_parameters_keeps_moving(rank: int):
    """From 0 towards 1 at 0.001 a step: bfloat16 would stop where a step is below its resolution."""
    model = shard_module(nn.Linear(4, 4, bias=False, dtype=torch.bfloat16), mesh_1d(2))
    nn.init.zeros_(model.weight)
    ema = EMA(model, 0.999)
    nn.init.ones_(model.weight)
    for _ in range(1000):
        ema.update()
    average = averages(ema)["weight"]
    assert average.dtype == torch.float32
    torch.testing.assert_close(average, torch.full((4, 4), 1 - 0.999**1000), atol=1e-4, rtol=0)
    with ema.swap():
        assert model.weight.dtype == torch.bfloat16
        torch.testing.assert_close(full(model.weight), average.bfloat16())
    assert torch.equal(averages(ema)["weight"], average), "swapping must not round the average"


@ranks(2)
def test_mixed_precision_averages_the_stored_parameters(rank: int):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard_by_hand(tiny(), mesh_1d(2), mp_policy=policy)
    ema = EMA(model, 0.9)
    step(model, rank, 0)
    ema.update()
    assert {tensor.dtype for tensor in averages(ema).values()} == {torch.float32}


@ranks(4)
def test_saved_on_four_ranks_loads_on_two_by_two(rank: int, tmp_path: Path):
    model = shard_by_hand(tiny(), mesh_1d(4))
    ema = EMA(model, 0.5)
    step(model, rank, 0)
    ema.update()
    dcp.save({"ema": ema}, checkpoint_id=tmp_path)
    other = EMA(shard_by_hand(tiny(seed=1), mesh_2d()), 0.5)
    dcp.load({"ema": other}, checkpoint_id=tmp_path)
    assert other.num_updates == 1
    assert_same(averages(other), averages(ema), atol=0, rtol=0)


@ranks(2)
def test_full_tensors_load_and_wrong_ones_are_named(rank: int):
    ema = EMA(shard_by_hand(tiny(), mesh_1d(2)), 0.9)
    whole = trainable(tiny(seed=1))
    ema.load_state_dict({"num_updates": 7, "shadow": whole})
    assert ema.num_updates == 7
    assert_same(averages(ema), whole, atol=0, rtol=0)
    wrong = {**whole, "extra": torch.ones(1), "gain": torch.ones(2)}
    del wrong["embedding.weight"]
    with pytest.raises(CheckpointError) as caught:
        ema.load_state_dict({"num_updates": 8, "shadow": wrong})
    for text in ("embedding.weight: missing", "extra: not in this model", r"gain: shape (2,), expected (1,)"):
        assert text in str(caught.value)
    assert_same(averages(ema), whole, atol=0, rtol=0)


def test_plain_model_with_buffers():
    model = nn.BatchNorm1d(2)
    ema = EMA(model, 0.5, include_buffers=True)
    model(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    ema.update()
    shadow = ema.state_dict()["shadow"]
    torch.testing.assert_close(shadow["running_mean"], model.running_mean / 2)  # pyrefly: ignore
    assert shadow["num_batches_tracked"].item() == 1


@pytest.mark.parametrize("decay", [-0.1, 1.5])
def test_decay_out_of_range_is_refused(decay: float):
    with pytest.raises(ConfigError, match=f"decay is {decay}"):
        EMA(nn.Linear(1, 1), decay)
    with pytest.raises(ConfigError, match=f"decay is {decay}"):
        EMA(nn.Linear(1, 1), lambda _: decay).update()
