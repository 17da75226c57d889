"""Optimizer state by parameter name: whole, exact, never silently empty, on any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from shardwise.checkpointing.formats.sharded import read_manifest
from shardwise.checkpointing.manager import Checkpointer
from shardwise.checkpointing.weights import load_full
from shardwise.errors import CheckpointError, ConfigError
from tests.by_hand import Tiny, full, loss_of, mesh_1d, mesh_2d, shard_by_hand, tiny, tokens
from tests.ranks import ranks


def trained(model: Tiny, optimizer: torch.optim.Optimizer, rank: int, num_steps: int = 2) -> None:
    for index in range(num_steps):
        optimizer.zero_grad()
        loss_of(model, tokens(rank, index)).backward()
        optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """By name; full tensors, copied. Collective."""
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            kept = full(value).detach().clone() if isinstance(value, torch.Tensor) else value
            found[f"{names[id(parameter)]}.{key}"] = kept
    return found


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert actual[name].dtype == value.dtype, name
            assert torch.equal(actual[name], value), name
        else:
            assert actual[name] == value, name


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


class LocalMomentum(torch.optim.Optimizer):
    """Keeps its state as plain tensors of the local shards, as hand-written optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                local, grad = (t.to_local() if isinstance(t, DTensor) else t for t in (p, p.grad))
                state = self.state[p]
                state.setdefault("buffer", torch.zeros_like(local)).mul_(0.9).add_(grad)
                state["count"] = state.get("count", 0) + 1
                local.sub_(group["lr"] * state["buffer"])


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "Adam fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True),
    "local": LocalMomentum,
}


FEW = ("AdamW", "SGD", "local")


@ranks(4)
@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=[] if each in FEW else [pytest.mark.slow]) for each in OPTIMIZERS]
)
def test_state_goes_to_another_mesh_and_goes_on_alike(rank: int, tmp_path: Path, kind: str):
    model = shard_by_hand(tiny(), mesh_1d(4))
    optimizer = OPTIMIZERS[kind](trainable(model))
    trained(model, optimizer, rank)
    assert any(p.grad is not None for p in model.parameters())  # torch's own function returns nothing then
    expected = state_of(model, optimizer)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model=model, optimizers=optimizer)
        trained(model, optimizer, rank, 1)  # what was saved does not move with the run
        checkpointer.wait()
        other = shard_by_hand(tiny(seed=3), mesh_2d())
        fresh = OPTIMIZERS[kind](trainable(other))
        checkpointer.load(model=other, optimizers=fresh)
        assert_same_state(restored(other, fresh, kind), expected)
        same = shard_by_hand(tiny(seed=4), mesh_1d(4))
        used = OPTIMIZERS[kind](trainable(same))
        trained(same, used, rank, 3)
        checkpointer.load(model=same, optimizers=used)
        assert_same_state(state_of(same, used), expected)
    trained(same, used, rank, 1)
    assert_same_state(state_of(same, used), state_of(model, optimizer))
    for (name, ours), theirs in zip(same.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(full(ours), full(theirs)), name


def restored(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> dict[str, Any]:
    """The state as it was on the first mesh: a local one is cut from the whole."""
    if kind != "local":
        return state_of(model, optimizer)
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        assert isinstance(parameter, DTensor)
        whole = DTensor.from_local(
            state["buffer"],
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
        ).full_tensor()
        rows = -(-whole.shape[0] // 4)
        rank = torch.distributed.get_rank()
        found[f"{names[id(parameter)]}.buffer"] = whole[rank * rows : (rank + 1) * rows]
        found[f"{names[id(parameter)]}.count"] = state["count"]
    return found


@ranks(2)
def test_options_and_groups_come_back_by_name(rank: int, tmp_path: Path):
    def groups(model: Tiny, order: int) -> list[dict[str, Any]]:
        blocks = [list(block.parameters()) for block in model.blocks]
        listed = [{"params": blocks[0], "lr": 0.3}, {"params": blocks[1]}, {"params": [model.gain, model.head.weight]}]
        return [*listed[::order], {"params": [], "lr": 7.0}]

    model = shard_by_hand(tiny(), mesh_1d(2))
    optimizer = torch.optim.AdamW(groups(model, 1), lr=torch.tensor(0.01), betas=(0.5, 0.6), weight_decay=0.2)
    trained(model, optimizer, rank)
    optimizer.param_groups[1]["lr"] = 0.7
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model=model, optimizers=[optimizer])
        other = shard_by_hand(tiny(seed=3), mesh_1d(2))
        fresh = torch.optim.AdamW(groups(other, -1), lr=5.0, foreach=False)
        fresh.param_groups[3]["lr"] = 5.0
        checkpointer.load(model=other, optimizers=[fresh])
    assert [round(float(group["lr"]), 6) for group in fresh.param_groups] == [0.01, 0.7, 0.3, 7.0]
    assert all(group["betas"] == (0.5, 0.6) for group in fresh.param_groups)
    assert all(group["weight_decay"] == 0.2 for group in fresh.param_groups)
    assert all(group["foreach"] is False for group in fresh.param_groups)  # how it computes is its own affair
    assert_same_state(state_of(other, fresh), state_of(model, optimizer))


@ranks(2)
def test_parameters_that_do_not_match_are_named(rank: int, tmp_path: Path):
    model = shard_by_hand(tiny(), mesh_1d(2))
    optimizer = torch.optim.AdamW(trainable(model))
    trained(model, optimizer, rank)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model=model, optimizers=optimizer)
        other = shard_by_hand(tiny(seed=3), mesh_1d(2))
        other.frozen.requires_grad_(True)
        other.gain.requires_grad_(False)
        before = {name: full(p).clone() for name, p in other.named_parameters()}
        fresh = torch.optim.AdamW(trainable(other))
        with pytest.raises(CheckpointError) as caught:
            checkpointer.load(model=other, optimizers=fresh)
        assert "frozen.weight is in no stored group" in str(caught.value)
        assert "gain was optimized when saved, but is not now" in str(caught.value)
        assert not fresh.state
        for name, p in other.named_parameters():
            assert torch.equal(full(p), before[name])
        checkpointer.load(model=other, optimizers=fresh, strict=False)
        assert other.blocks[0].up.weight in fresh.state
        assert other.frozen.weight not in fresh.state
        bare = torch.optim.SGD(trainable(model), lr=0.1)
        checkpointer.save(2, model=model)
        with pytest.raises(CheckpointError, match=r"(?s)optim: the checkpoint has no state of this optimizer"):
            checkpointer.load(model=model, optimizers=bare)


@ranks(2)
def test_foreign_parameters_are_refused_on_every_rank(rank: int, tmp_path: Path):
    model = shard_by_hand(tiny(), mesh_1d(2))
    other = torch.optim.SGD([nn.Parameter(torch.ones(3))] if rank == 1 else trainable(model), lr=0.1)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError, match="1 of 1 parameters are not parameters of the saved models"):
            checkpointer.save(1, model=model, optimizers=other)
        with pytest.raises(ConfigError, match="pass it in model= or optimizers="):
            checkpointer.save(1, model=model, critic=other)
        with pytest.raises(ConfigError, match="no state_dict"):
            checkpointer.save(1, model=model, data=object())
        with pytest.raises(CheckpointError, match="cannot be stored"):
            checkpointer.save(1, model=model, extra={"function": print})
        with pytest.raises(CheckpointError, match="ranks save different steps"):
            checkpointer.save(rank, model=model)
        assert checkpointer.latest() is None


@ranks(2)
def test_several_models_and_optimizers(rank: int, tmp_path: Path):
    models = {name: shard_by_hand(tiny(seed=index), mesh_1d(2)) for index, name in enumerate(("actor", "critic"))}
    optimizers = {name: torch.optim.AdamW(trainable(model), lr=0.01) for name, model in models.items()}
    for name, model in models.items():
        trained(model, optimizers[name], rank)
    expected = {name: state_of(models[name], optimizers[name]) for name in models}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model=models, optimizers=optimizers)
        others = {name: shard_by_hand(tiny(seed=9), mesh_1d(2)) for name in models}
        fresh = {name: torch.optim.AdamW(trainable(model), lr=0.5) for name, model in others.items()}
        checkpointer.load(model=others, optimizers=fresh)
        only = shard_by_hand(tiny(seed=8), mesh_1d(2))
        checkpointer.load(model={"critic": only})  # what is not asked for stays unread
        with pytest.raises(CheckpointError, match="the weights do not match"):
            checkpointer.load(model={"teacher": only})
    for name in models:
        assert_same_state(state_of(others[name], fresh[name]), expected[name])
        assert fresh[name].param_groups[0]["lr"] == 0.01
    for ours, theirs in zip(only.parameters(), models["critic"].parameters(), strict=True):
        assert torch.equal(full(ours), full(theirs))
    contents = read_manifest(tmp_path / "step-00000001")
    assert "model.actor.blocks.0.up.weight" in contents.tensors
    assert "optim.critic.state.critic.blocks.0.up.weight.exp_avg" in contents.tensors


@ranks(2)
def test_torch_reads_ours_and_we_read_torchs(rank: int, tmp_path: Path):
    model = shard_by_hand(tiny(), mesh_1d(2))
    optimizer = torch.optim.AdamW(trainable(model), lr=0.01, betas=(0.7, 0.8))
    trained(model, optimizer, rank)
    expected = state_of(model, optimizer)
    with Checkpointer(tmp_path / "ours") as checkpointer:
        checkpointer.save(1, model=model, optimizers=optimizer)
    optimizer.zero_grad()
    dcp.save(
        {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=tmp_path / "torchs",
    )

    by_torch = shard_by_hand(tiny(seed=3), mesh_1d(2))
    fresh = torch.optim.AdamW(trainable(by_torch), lr=9.0)
    wanted = {"model": get_model_state_dict(by_torch), "optim": get_optimizer_state_dict(by_torch, fresh)}
    dcp.load(wanted, checkpoint_id=tmp_path / "ours/step-00000001")
    set_model_state_dict(by_torch, wanted["model"])
    set_optimizer_state_dict(by_torch, fresh, wanted["optim"])
    assert_same_state(state_of(by_torch, fresh), expected)
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["betas"]) == (0.01, (0.7, 0.8))

    by_us = shard_by_hand(tiny(seed=4), mesh_1d(2))
    fresh = torch.optim.AdamW(trainable(by_us), lr=9.0)
    with Checkpointer(tmp_path / "unused") as checkpointer:
        assert checkpointer.load(model=by_us, optimizers=fresh, path=tmp_path / "torchs") == 0
    assert_same_state(state_of(by_us, fresh), expected)
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["betas"]) == (0.01, (0.7, 0.8))
    for ours, theirs in zip(by_us.parameters(), model.parameters(), strict=True):
        assert torch.equal(full(ours), full(theirs))


@ranks(2)
def test_flattened_optimizer_state_of_torch_is_read(rank: int, tmp_path: Path):
    """`flatten_optimizer_state_dict=True`, as torchtitan saves: one entry for each state and option of a parameter."""

    def build(seed: int, *decays: float) -> tuple[Tiny, torch.optim.Optimizer]:
        model = shard_by_hand(tiny(seed=seed), mesh_1d(2))
        parameters = trainable(model)
        groups = [{"params": parameters[:3]}, {"params": parameters[3:6]}, {"params": parameters[6:]}]
        groups = [group | {"weight_decay": decay} for group, decay in zip(groups, decays, strict=True)]
        return model, torch.optim.AdamW(groups, lr=0.01, betas=(0.7, 0.8))

    model, optimizer = build(1, 0.0, 0.5, 0.5)
    trained(model, optimizer, rank)
    states = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({**get_model_state_dict(model), "optimizer": states}, checkpoint_id=tmp_path / "torchs")

    loaded, fresh = build(3, 9.0, 9.0, 9.0)
    with Checkpointer(tmp_path / "unused") as checkpointer:
        checkpointer.load(model=loaded, optimizers=fresh, path=tmp_path / "torchs")
    assert_same_state(state_of(loaded, fresh), state_of(model, optimizer))
    assert [(group["weight_decay"], group["betas"]) for group in fresh.param_groups] == [
        (decay, (0.7, 0.8)) for decay in (0.0, 0.5, 0.5)
    ]
    merged = torch.optim.AdamW(trainable(loaded))
    with pytest.raises(CheckpointError, match="no stored group"):
        load_full(tmp_path / "torchs", model=loaded, optimizers=merged)
