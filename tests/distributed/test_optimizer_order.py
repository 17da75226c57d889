"""Optimizer state follows names: ranks with different orders of parameters save and load what one process would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import shardwise as sw
from shardwise import fsdp1
from shardwise.errors import CheckpointError
from tests.ranks import ranks

# Losses are sums over the same batch on every rank; only the order of float32 sums differs from one process.
TOLERANCE = 1e-6
STORAGE = sw.PrecisionConfig(param_dtype="storage")


def net() -> nn.Sequential:
    """Equal shapes throughout, so that mixed-up state fits everywhere; a head that nothing trains."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)], nn.Linear(8, 8))


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01)


def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9)


def built(
    model: nn.Module, order: str, rank: int, make: Callable[..., torch.optim.Optimizer] = adamw
) -> torch.optim.Optimizer:
    """An optimizer whose lists are turned by as many places as the rank's number: what Python sets do."""
    named = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in model.named_parameters()}

    def turned(names: list[str]) -> list[nn.Parameter]:
        by = rank % len(names) if order in ("parameters", "both") else 0
        return [named[name] for name in names[by:] + names[:by]]

    groups = [
        {"params": turned([n for n in named if n.endswith("weight")]), "weight_decay": 0.1},
        {"params": turned([n for n in named if n.endswith("bias")]), "weight_decay": 0.0, "lr": 0.02},
    ]
    return make(groups[::-1] if order in ("groups", "both") and rank % 2 else groups)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0, num_steps: int = 3) -> None:
    for step in range(first, first + num_steps):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        body = model[:-1] if isinstance(model, nn.Sequential) else model  # the reference skips the head as `Part` does
        body(batch).pow(2).sum().backward()
        optimizer.step()


class Part(nn.Module):
    """The net without its last layer in the forward: that layer has no gradient and no state, on any rank."""

    def __init__(self) -> None:
        super().__init__()
        for index, layer in enumerate(net()):
            self.add_module(str(index), layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(4):
            x = getattr(self, str(index))(x)
        return x


def reference(num_steps: int = 3, make: Callable[..., torch.optim.Optimizer] = adamw) -> tuple[nn.Module, Any]:
    """One process, parameters in the model's order."""
    model = net()
    optimizer = built(model, "same", 0, make)
    train(model, optimizer, num_steps=num_steps)
    return model, optimizer


def expected_state(make: Callable[..., torch.optim.Optimizer] = adamw) -> dict[str, dict[str, torch.Tensor]]:
    model, optimizer = reference(make=make)
    return {name: optimizer.state[p] for name, p in model.named_parameters() if optimizer.state.get(p)}


def assert_by_name(state: dict[str, Any], make: Callable[..., torch.optim.Optimizer] = adamw) -> None:
    """Full state by parameter names is what one process has; of the layer that is not used, torch may keep zeros."""
    wanted = expected_state(make)
    assert {name for name in state if state[name] and not name.startswith("4.")} == wanted.keys()
    for name, values in wanted.items():
        assert state[name].keys() == values.keys(), name
        for key, value in values.items():
            difference = (torch.as_tensor(state[name][key]).float() - value.float()).abs().max().item()
            assert difference < TOLERANCE, (name, key, difference)


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def live_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Collective: in the model's order on every rank."""
    return {
        name.replace("_fsdp_wrapped_module.", ""): {key: full(value) for key, value in optimizer.state[p].items()}
        for name, p in nn.Module.named_parameters(model)
        if optimizer.state.get(p)
    }


def options_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    names = {id(p): name.replace("_fsdp_wrapped_module.", "") for name, p in model.named_parameters()}
    return {
        names[id(p)]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]
    }


def assert_goes_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two more steps, and the weights are those of five steps in one process."""
    train(model, optimizer, first=3, num_steps=2)
    wanted, _ = reference(num_steps=5)
    for (name, p), q in zip(model.named_parameters(), wanted.parameters(), strict=True):
        # The second moment divides small numbers: rounding grows a little.
        torch.testing.assert_close(full(p), q, atol=2e-6, rtol=1e-5, msg=name)


def sharded(order: str, rank: int, *, steps: int = 3, make: Callable[..., torch.optim.Optimizer] = adamw) -> Any:
    model = sw.shard(Part(), sw.ShardConfig(precision=STORAGE))
    optimizer = built(model, order, rank, make)
    train(model, optimizer, num_steps=steps)
    return model, optimizer


ORDERS = ["parameters", "groups", "both"]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@ranks(2)
def test_checkpointer(rank: int, tmp_path: Path, order: str, background: bool) -> None:
    check_checkpointer(rank, tmp_path, order, background=background)


@pytest.mark.parametrize("order", ORDERS)
@ranks(4)
def test_checkpointer_on_four(rank: int, tmp_path: Path, order: str) -> None:
    check_checkpointer(rank, tmp_path, order, background=False)


def check_checkpointer(rank: int, folder: Path, order: str, *, background: bool) -> None:
    model, optimizer = sharded(order, rank)
    with sw.Checkpointer(folder / "run", asynchronous=background) as checkpointer:
        assert checkpointer.save(3, model=model, optimizers=optimizer)
        checkpointer.wait()
        assert sw.verify_checkpoint(folder / "run") == []
        other, fresh = sharded("same", rank, steps=0)
        checkpointer.load(model=other, optimizers=fresh)
        assert_by_name(live_state(other, fresh))
        # Loaded into yet another order.
        third, turned = sharded(order, rank + 1, steps=1)
        checkpointer.load(model=third, optimizers=turned)
    assert_by_name(live_state(third, turned))
    assert options_by_name(third, turned) == options_by_name(model, optimizer)
    assert_goes_on(third, turned)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("make", [adamw, sgd])
@ranks(2)
def test_saved_on_two_ranks_and_loaded_on_one(
    rank: int, tmp_path: Path, order: str, make: Callable[..., torch.optim.Optimizer]
) -> None:
    model, optimizer = sharded(order, rank, make=make)
    with sw.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
        checkpointer.save(3, model=model, optimizers=optimizer)
    sw.convert_checkpoint(tmp_path / "run" / "step-00000003", tmp_path / f"{rank}.pt", "full")
    stored = torch.load(tmp_path / f"{rank}.pt")["optim"]
    assert_by_name(stored["state"], make)
    decays = {name: group["weight_decay"] for group in stored["param_groups"] for name in group["params"]}
    assert decays == {name: 0.1 if name.endswith("weight") else 0.0 for name in decays}
    assert len(decays) == 10


@pytest.mark.parametrize("order", ORDERS)
@ranks(2)
def test_full_file(rank: int, tmp_path: Path, order: str) -> None:
    check_full_file(rank, tmp_path, order)


@pytest.mark.parametrize("order", ORDERS)
@ranks(4)
def test_full_file_on_four(rank: int, tmp_path: Path, order: str) -> None:
    check_full_file(rank, tmp_path, order)


def check_full_file(rank: int, folder: Path, order: str) -> None:
    model, optimizer = sharded(order, rank)
    sw.save_full(folder / "full.pt", model=model, optimizers=optimizer)
    assert_by_name(torch.load(folder / "full.pt")["optim"]["state"])
    other, fresh = sharded(order, rank + 1, steps=1)
    sw.load_full(folder / "full.pt", model=other, optimizers=fresh)
    assert_by_name(live_state(other, fresh))
    assert options_by_name(other, fresh) == options_by_name(model, optimizer)
    assert_goes_on(other, fresh)


@pytest.mark.parametrize("order", ORDERS)
@ranks(2)
def test_torchs_own_functions(rank: int, tmp_path: Path, order: str) -> None:
    check_torch(rank, tmp_path, order)


@pytest.mark.parametrize("order", ORDERS)
@ranks(4)
def test_torchs_own_functions_on_four(rank: int, tmp_path: Path, order: str) -> None:
    check_torch(rank, tmp_path, order)


def check_torch(rank: int, folder: Path, order: str) -> None:
    model, optimizer = sharded(order, rank)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(model, optimizer, options=whole)
    if rank == 0:
        assert_by_name(state["state"])
    # Rank 0 sends its state dict: names in its own order, for optimizers that list them in another.
    other, fresh = sharded(order, rank + 1, steps=0)
    sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_optimizer_state_dict(other, fresh, state if rank == 0 else {}, options=sent)
    assert_by_name(live_state(other, fresh))
    # Sharded, through torch.distributed.checkpoint.
    dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder / "dcp")
    third, turned = sharded(order, rank + 1, steps=0)
    target = {"optim": get_optimizer_state_dict(third, turned)}
    dcp.load(target, checkpoint_id=folder / "dcp", planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    set_optimizer_state_dict(third, turned, target["optim"], options=StateDictOptions(strict=False))
    assert_by_name(live_state(third, turned))


def wrapped(order: str, rank: int, *, steps: int = 3) -> Any:
    model = fsdp1.FullyShardedDataParallel(Part())
    optimizer = built(model, order, rank)
    train(model, optimizer, num_steps=steps)
    return model, optimizer


@pytest.mark.parametrize("rank0_only", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@ranks(2)
def test_fsdp1_full(rank: int, order: str, rank0_only: bool) -> None:
    check_fsdp1_full(rank, order, rank0_only=rank0_only)


@pytest.mark.parametrize("order", ORDERS)
@ranks(4)
def test_fsdp1_full_on_four(rank: int, order: str) -> None:
    check_fsdp1_full(rank, order, rank0_only=False)


def check_fsdp1_full(rank: int, order: str, *, rank0_only: bool) -> None:
    FSDP = fsdp1.FullyShardedDataParallel
    model, optimizer = wrapped(order, rank)
    config = fsdp1.FullOptimStateDictConfig(rank0_only=rank0_only)
    other, fresh = wrapped(order, rank + 1, steps=0)
    for each in (model, other):
        FSDP.set_state_dict_type(each, fsdp1.StateDictType.FULL_STATE_DICT, optim_state_dict_config=config)
    state = FSDP.optim_state_dict(model, optimizer)
    if rank == 0 or not rank0_only:
        assert_by_name(state["state"])
        assert [group["weight_decay"] for group in state["param_groups"]] == [0.1, 0.0]
    fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, state))
    assert_by_name(live_state(other, fresh))
    options = {name: (0.01, 0.1) if name.endswith("weight") else (0.02, 0.0) for name, _ in net().named_parameters()}
    assert options_by_name(other, fresh) == options


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
@pytest.mark.parametrize("order", ORDERS)
@ranks(2)
def test_fsdp1_sharded_through_dcp(rank: int, tmp_path: Path, order: str, kind: str) -> None:
    FSDP = fsdp1.FullyShardedDataParallel
    model, optimizer = wrapped(order, rank)
    FSDP.set_state_dict_type(model, fsdp1.StateDictType[kind])
    dcp.save({"optim": FSDP.optim_state_dict(model, optimizer)}, checkpoint_id=tmp_path / "dcp")
    other, fresh = wrapped(order, rank + 1, steps=1)
    FSDP.set_state_dict_type(other, fsdp1.StateDictType[kind])
    target = {"optim": FSDP.optim_state_dict(other, fresh)}
    dcp.load(target, checkpoint_id=tmp_path / "dcp")
    fresh.load_state_dict(FSDP.optim_state_dict_to_load(other, fresh, target["optim"]))
    assert_by_name(live_state(other, fresh))
    options = {name: (0.01, 0.1) if name.endswith("weight") else (0.02, 0.0) for name, _ in net().named_parameters()}
    assert options_by_name(other, fresh) == options


# A rank that lacks an entry.


def damaged(order: str, rank: int, lacking: int) -> Any:
    """One rank forgets the state of one weight, as an optimizer does that never had its gradient."""
    model, optimizer = sharded(order, rank)
    if rank == lacking:
        del optimizer.state[model.get_submodule("1").weight]
    return model, optimizer


@pytest.mark.parametrize("lacking", [0, 1])
@pytest.mark.parametrize("way", ["checkpointer", "background", "full"])
@ranks(2)
def test_a_rank_without_an_entry_is_named(rank: int, tmp_path: Path, way: str, lacking: int) -> None:
    model, optimizer = damaged("parameters", rank, lacking)

    def save() -> None:
        if way == "full":
            return sw.save_full(tmp_path / "full.pt", model=model, optimizers=optimizer)
        with sw.Checkpointer(tmp_path / "run", asynchronous=way == "background") as checkpointer:
            checkpointer.save(3, model=model, optimizers=optimizer)
            checkpointer.wait()
        return None

    with pytest.raises(CheckpointError, match=rf"rank {lacking} has no shard of 2 tensors") as caught:
        save()
    assert "1.weight.exp_avg" in caught.value.where
    assert "1.weight.exp_avg_sq" in caught.value.where
    assert not list(tmp_path.rglob("*.pt")) + list(tmp_path.rglob("manifest.json"))
    dist.barrier()  # the ranks can still talk


@pytest.mark.parametrize("lacking", [0, 1])
@ranks(2)
def test_fsdp1_names_a_rank_without_an_entry(rank: int, lacking: int) -> None:
    model, optimizer = wrapped("parameters", rank)
    if rank == lacking:
        del optimizer.state[model.module.get_submodule("1").weight]
    with pytest.raises(CheckpointError, match=rf"rank {lacking} has no shard of 2 tensors"):
        fsdp1.FullyShardedDataParallel.optim_state_dict(model, optimizer)
    dist.barrier()


@pytest.mark.parametrize("replicate", [1, 2])
@ranks(4)
def test_two_ranks_without_an_entry_are_named(rank: int, tmp_path: Path, replicate: int) -> None:
    """Also where a replica of theirs has the entry and the checkpoint would be whole."""
    sw.init_distributed(sw.MeshConfig(replicate=replicate))
    model, optimizer = sharded("both", rank)
    if rank in (1, 2):
        del optimizer.state[model.get_submodule("1").weight]
    with (
        sw.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer,
        pytest.raises(CheckpointError, match="ranks 1, 2 have no shard of 2 tensors"),
    ):
        checkpointer.save(3, model=model, optimizers=optimizer)


@ranks(2)
def test_an_entry_lost_between_two_saves_is_named(rank: int, tmp_path: Path) -> None:
    model, optimizer = sharded("same", rank)
    with sw.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
        checkpointer.save(3, model=model, optimizers=optimizer)
        if rank == 1:
            del optimizer.state[model.get_submodule("1").weight]
        with pytest.raises(CheckpointError, match="rank 1 has no shard"):
            checkpointer.save(4, model=model, optimizers=optimizer)
        assert checkpointer.latest() == 3


@pytest.mark.parametrize("holder", [pytest.param(0, marks=pytest.mark.slow), 1])
@ranks(2)
def test_plain_state_on_one_rank_only(rank: int, tmp_path: Path, holder: int) -> None:
    """A parameter that is not sharded may have state on one rank only; the full file keeps the first rank's."""
    config = sw.ShardConfig(precision=STORAGE, ignored=("4",))
    model = sw.shard(Part(), config)
    optimizer = built(model, "parameters", rank)
    train(model, optimizer)
    if rank == holder:
        model.get_submodule("4").weight.grad = torch.ones(8, 8)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = p.grad if p is model.get_submodule("4").weight else None
        optimizer.step()
    sw.save_full(tmp_path / "full.pt", model=model, optimizers=optimizer)
    state = torch.load(tmp_path / "full.pt")["optim"]["state"]
    assert ("4.weight" in state) == (holder == 0)
    assert_by_name(state)


@ranks(2)
def test_a_clipped_norm_does_not_depend_on_the_order(rank: int) -> None:
    model = sw.shard(Part(), sw.ShardConfig(precision=STORAGE, ignored=("3",)))
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    model(batch).pow(2).sum().backward()
    listed = list(model.parameters())
    norm = sw.clip_grad_norm_(listed[::-1] if rank else listed, 1e9)
    plain = net()
    plain[:-1](batch).pow(2).sum().backward()
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
