"""Optimizer state between runs that shard and runs that do not: every tensor takes its parameter's layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import ShardConfig, load_full, save_full, shard
from shardwise.checkpointing.manager import Checkpointer
from tests.by_hand import FP32, Tiny, full, loss_of, mesh_1d, shard_module, tokens
from tests.ranks import ranks

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "Adam-fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "SGD-momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True, momentum=0.5),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}
COUNTERS = {"step", "mu_product"}


class Scalar(Tiny):
    """With a parameter of no dimensions: its counters have the shape of the parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: torch.Tensor, skip: Any = ()) -> torch.Tensor:
        return super().forward(tokens, skip) * self.level


def built(seed: int) -> Scalar:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Scalar()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """The same batch on every rank: so that one process, and ranks that average nothing, do the same."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, tokens(0, step)).backward()
        optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    names = {id(p): name for name, p in model.named_parameters()}
    found = {
        f"{names[id(p)]}.{key}": full(value).detach().clone()
        for p, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    return found | {f"weights of {name}": full(p).detach().clone() for name, p in model.named_parameters()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        torch.testing.assert_close(found[name], value, **(tolerance or {"rtol": 0, "atol": 0}), msg=name)


def assert_laid_out_as_parameters(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            assert state
            for key, value in state.items():
                if key in COUNTERS or not isinstance(parameter, DTensor):
                    assert type(value) is torch.Tensor, key
                else:
                    assert isinstance(value, DTensor), key
                    assert (value.placements, value.device_mesh) == (parameter.placements, parameter.device_mesh), key
                    assert value.shape == parameter.shape
                    assert value.to_local().shape == parameter.to_local().shape


def make(layout: str, seed: int) -> Any:
    model = built(seed)
    if layout == "by-hand":
        for block in model.blocks:
            shard_module(block, mesh_1d(2))
        return shard_module(model, mesh_1d(2), ignored_params={model.level})
    if layout == "shard":
        return shard(model, ShardConfig(ignored=("level",)), mesh=mesh_1d(2))
    return model


@ranks(2)
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        *(("AdamW", *layouts) for layouts in (("plain", "shard"), ("by-hand", "plain"), ("shard", "by-hand"))),
        *((kind, "plain", "by-hand") for kind in OPTIMIZERS),
    ],
)
def test_state_takes_the_layout_of_the_model_it_is_loaded_into(
    rank: int, tmp_path: Path, kind: str, before: str, after: str
):
    model = make(before, 0)
    optimizer = OPTIMIZERS[kind](trainable(model))
    train(model, optimizer, range(2))
    expected = state_of(model, optimizer)
    other = make(after, 7)
    fresh = OPTIMIZERS[kind](trainable(other))
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(1, model=model, optimizers=optimizer)
        checkpointer.load(model=other, optimizers=fresh)
    assert_laid_out_as_parameters(fresh)
    assert_same(state_of(other, fresh), expected)
    train(model, optimizer, range(2, 4))
    train(other, fresh, range(2, 4))
    assert_same(state_of(other, fresh), state_of(model, optimizer), **FP32)


@ranks(2)
@pytest.mark.parametrize("kind", ["AdamW", "SGD-momentum"])
@pytest.mark.parametrize(("before", "after"), [("plain", "by-hand"), ("by-hand", "plain")])
def test_a_file_of_whole_tensors_does_so_too(rank: int, tmp_path: Path, kind: str, before: str, after: str):
    model = make(before, 0)
    optimizer = OPTIMIZERS[kind](trainable(model))
    train(model, optimizer, range(2))
    other = make(after, 7)
    fresh = OPTIMIZERS[kind](trainable(other))
    save_full(tmp_path / "full.pt", model=model, optimizers=optimizer)
    load_full(tmp_path / "full.pt", model=other, optimizers=fresh)
    assert_laid_out_as_parameters(fresh)
    assert_same(state_of(other, fresh), state_of(model, optimizer))


@ranks(2)
def on_two_ranks(rank: int, folder: Path, save: bool) -> None:
    model = make("by-hand", 0 if save else 7)
    optimizer = OPTIMIZERS["AdamW"](trainable(model))
    with Checkpointer(folder) as checkpointer:
        if save:
            train(model, optimizer, range(2))
            checkpointer.save(2, model=model, optimizers=optimizer)
        else:
            assert checkpointer.load(model=model, optimizers=optimizer) == 2
            assert_laid_out_as_parameters(optimizer)
            train(model, optimizer, range(2, 4))
            checkpointer.save(4, model=model, optimizers=optimizer)


def test_one_process_goes_on_on_two_ranks_and_back(tmp_path: Path):
    single = built(0)
    optimizer = OPTIMIZERS["AdamW"](trainable(single))
    train(single, optimizer, range(2))
    with Checkpointer(tmp_path / "single") as checkpointer:
        checkpointer.save(2, model=single, optimizers=optimizer)
    on_two_ranks(folder=tmp_path / "single", save=False)
    on_two_ranks(folder=tmp_path / "two", save=True)
    for folder, step in ((tmp_path / "two", 2), (tmp_path / "single", 4)):
        other = built(7)
        fresh = OPTIMIZERS["AdamW"](trainable(other))
        with Checkpointer(folder) as checkpointer:
            assert checkpointer.load(model=other, optimizers=fresh) == step
        assert_laid_out_as_parameters(fresh)
        if step == 4:
            train(single, optimizer, range(2, 4))
        assert_same(state_of(other, fresh), state_of(single, optimizer), **FP32)
