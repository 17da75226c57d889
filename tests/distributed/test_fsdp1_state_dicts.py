"""State dicts of shardwise.fsdp1: what FSDP1 returns and takes, for the model and for its optimizer."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from shardwise.errors import ConfigError, ShardError
from shardwise.fsdp1 import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    ShardedStateDictConfig,
)
from shardwise.fsdp1 import FullyShardedDataParallel as FSDP
from tests.by_hand import Block, assert_same, loss_of, tokens
from tests.fsdp1_pairs import (
    OURS,
    REAL,
    assert_same_optimizer,
    both,
    full_state,
    model_for,
    optimizer_state,
    quiet,
    trained,
    wrapped,
)
from tests.ranks import ranks

BLOCKS = ModuleWrapPolicy({Block})


def stepped(api: Any, rank: int, steps: int = 2, **arguments: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A wrapped model and its optimizer, after some steps."""
    unit = wrapped(api, model_for(api), **({"auto_wrap_policy": BLOCKS, "use_orig_params": True} | arguments))
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in unit.named_parameters() if "norm" in n], "weight_decay": 0.0},
            {"params": [p for n, p in unit.named_parameters() if "norm" not in n], "weight_decay": 0.1},
        ],
        lr=0.01,
    )
    walk(unit, optimizer, rank, range(steps))
    return unit, optimizer


def walk(unit: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(unit, tokens(rank, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@ranks(2)
def test_full_state_dicts_are_those_of_fsdp1(rank: int, strategy: str):
    def run(api: Any) -> Any:
        unit, optimizer = stepped(api, rank, sharding_strategy=ShardingStrategy[strategy])
        return unit.state_dict(), optimizer_state(api, unit, optimizer)

    (real, real_optimizer), (ours, our_optimizer) = both(run)
    assert list(ours) == list(real)
    assert_same(ours, real)
    assert_same_optimizer(our_optimizer, real_optimizer)
    assert all(type(value) is torch.Tensor for value in ours.values())


@ranks(2)
def test_rank0_only_gives_the_other_ranks_nothing(rank: int):
    def run(api: Any) -> Any:
        unit, optimizer = stepped(api, rank)
        kind = StateDictType.FULL_STATE_DICT
        configs = (FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True))
        with api.FullyShardedDataParallel.state_dict_type(unit, kind, *configs):
            return sorted(unit.state_dict()), sorted(api.FullyShardedDataParallel.optim_state_dict(unit, optimizer))

    real, ours = both(run)
    assert ours == real
    assert bool(ours[0]) == (rank == 0)


@ranks(2)
def test_a_checkpoint_of_fsdp1_goes_on_as_if_it_had_not_stopped(rank: int):
    with quiet():
        unit, optimizer = stepped(REAL, rank)
        state, optimizer_states = full_state(REAL, unit), optimizer_state(REAL, unit, optimizer)
        expected = walk(unit, optimizer, rank, range(2, 5))
        ours, our_optimizer = stepped(OURS, rank, steps=0)
    result = ours.load_state_dict(state)
    our_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(ours, our_optimizer, optimizer_states))
    assert not result.missing_keys
    assert walk(ours, our_optimizer, rank, range(2, 5)) == pytest.approx(expected, rel=1e-5)


@ranks(2)
def test_our_checkpoint_goes_on_in_fsdp1(rank: int):
    with quiet():
        unit, optimizer = stepped(OURS, rank)
        state, optimizer_states = full_state(OURS, unit), optimizer_state(OURS, unit, optimizer)
        expected = walk(unit, optimizer, rank, range(2, 5))
        real, real_optimizer = stepped(REAL, rank, steps=0)
        real.load_state_dict(state)
        to_load = REAL.FullyShardedDataParallel.optim_state_dict_to_load(real, real_optimizer, optimizer_states)
        real_optimizer.load_state_dict(to_load)
        assert walk(real, real_optimizer, rank, range(2, 5)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("call", ["to_load", "to_load in the old order", "shard", "scatter", "from rank 0"])
@ranks(2)
def test_optimizer_state_loads_by_every_call(rank: int, call: str):
    unit, optimizer = stepped(OURS, rank)
    state = unit.state_dict()
    whole = FSDP.full_optim_state_dict(unit, optimizer, rank0_only=call in ("scatter", "from rank 0"))
    assert bool(whole) == (rank == 0 or call not in ("scatter", "from rank 0"))
    expected = walk(unit, optimizer, rank, range(2, 4))
    fresh, fresh_optimizer = stepped(OURS, rank, steps=0)
    fresh.load_state_dict(state)
    if call == "to_load":
        to_load = FSDP.optim_state_dict_to_load(fresh, fresh_optimizer, whole)
    elif call == "to_load in the old order":
        to_load = FSDP.optim_state_dict_to_load(whole, fresh, fresh_optimizer)
    elif call == "shard":
        to_load = FSDP.shard_full_optim_state_dict(whole, fresh, optim=fresh_optimizer)
    elif call == "scatter":
        to_load = FSDP.scatter_full_optim_state_dict(whole or None, fresh, optim=fresh_optimizer)
    else:
        FSDP.set_state_dict_type(fresh, StateDictType.FULL_STATE_DICT, None, FullOptimStateDictConfig(rank0_only=True))
        to_load = FSDP.optim_state_dict_to_load(fresh, fresh_optimizer, whole)
    fresh_optimizer.load_state_dict(to_load)
    assert walk(fresh, fresh_optimizer, rank, range(2, 4)) == pytest.approx(expected, rel=1e-6)


@ranks(2)
def test_loading_leaves_the_given_state_alone(rank: int):
    unit, optimizer = stepped(OURS, rank)
    whole = FSDP.full_optim_state_dict(unit, optimizer, rank0_only=False)
    before = {name: value["step"].item() for name, value in whole["state"].items()}
    walk(unit, optimizer, rank, range(2, 3))  # the dictionary must not hold the optimizer's own counters
    assert {name: value["step"].item() for name, value in whole["state"].items()} == before
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(unit, optimizer, whole))
    walk(unit, optimizer, rank, range(2, 4))
    assert {name: value["step"].item() for name, value in whole["state"].items()} == before


@ranks(2)
def test_optimizer_state_is_rekeyed_as_by_fsdp1(rank: int):
    def run(api: Any) -> Any:
        unit, optimizer = stepped(api, rank)
        plain = model_for(api)
        whole = optimizer_state(api, unit, optimizer)
        numbered = api.FullyShardedDataParallel.rekey_optim_state_dict(whole, OptimStateKeyType.PARAM_ID, plain)
        named = api.FullyShardedDataParallel.rekey_optim_state_dict(numbered, OptimStateKeyType.PARAM_NAME, plain)
        return numbered, named

    (real_numbered, real_named), (our_numbered, our_named) = both(run)
    assert_same_optimizer(our_numbered, real_numbered)
    assert_same_optimizer(our_named, real_named)


@ranks(2)
def test_an_optimizer_of_a_plain_model_loads_rekeyed_state(rank: int):
    unit, optimizer = stepped(OURS, rank)
    plain = model_for(OURS)
    plain.load_state_dict(unit.state_dict())
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    whole = FSDP.full_optim_state_dict(unit, optimizer, rank0_only=False)
    whole["param_groups"] = [
        whole["param_groups"][0] | {"params": [n for g in whole["param_groups"] for n in g["params"]]}
    ]
    numbered = FSDP.rekey_optim_state_dict(whole, OptimStateKeyType.PARAM_ID, plain, optim=plain_optimizer)
    plain_optimizer.load_state_dict(numbered)
    for name, parameter in plain.named_parameters():
        expected = whole["state"][name]["exp_avg"]
        torch.testing.assert_close(plain_optimizer.state[parameter]["exp_avg"], expected)


@pytest.mark.parametrize("to_cpu", [False, True])
@ranks(2)
def test_sharded_state_dicts_hold_copies_sharded_by_name(rank: int, to_cpu: bool):
    unit, optimizer = stepped(OURS, rank)
    whole = full_state(OURS, unit)
    with FSDP.state_dict_type(unit, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=to_cpu)):
        sharded, sharded_optimizer = unit.state_dict(), FSDP.optim_state_dict(unit, optimizer)
    assert list(sharded) == list(whole)
    assert all(isinstance(sharded[name], DTensor) for name in whole if name != "scale")
    walk(unit, optimizer, rank, range(2, 3))
    assert_same({n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in sharded.items()}, whole)
    moments = sharded_optimizer["state"]["blocks.0.up.weight"]
    assert isinstance(moments["exp_avg"], DTensor)
    assert moments["step"].item() == 2
    with FSDP.state_dict_type(unit, StateDictType.SHARDED_STATE_DICT):
        unit.load_state_dict(sharded)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(unit, optimizer, sharded_optimizer))
    assert_same(full_state(OURS, unit), whole)


@pytest.mark.parametrize("api", ["real", "ours"])
@ranks(2)
def test_dcp_moves_sharded_state_from_either_to_ours(rank: int, tmp_path: Path, api: str):
    source = REAL if api == "real" else OURS
    with quiet():
        unit, _ = stepped(source, rank)
        expected = full_state(source, unit)
        with source.FullyShardedDataParallel.state_dict_type(unit, StateDictType.SHARDED_STATE_DICT):
            dcp.save({"model": unit.state_dict()}, checkpoint_id=tmp_path / "checkpoint")
        fresh, _ = stepped(OURS, rank, steps=0)
        with FSDP.state_dict_type(fresh, StateDictType.SHARDED_STATE_DICT):
            state = {"model": fresh.state_dict()}
            dcp.load(state, checkpoint_id=tmp_path / "checkpoint")
            fresh.load_state_dict(state["model"])
    assert_same(full_state(OURS, fresh), expected)


@ranks(2)
def test_sharded_state_of_another_mesh_is_laid_out_anew(rank: int):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    unit, _ = stepped(OURS, rank)
    expected = full_state(OURS, unit)
    copies, _ = stepped(OURS, rank, steps=0, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    with FSDP.state_dict_type(unit, StateDictType.SHARDED_STATE_DICT):
        copies.load_state_dict(unit.state_dict())
    assert_same(full_state(OURS, copies), expected)


@ranks(2)
def test_local_state_dicts_come_back_on_the_same_ranks(rank: int):
    unit, optimizer = stepped(OURS, rank)
    expected = full_state(OURS, unit)
    with quiet(), FSDP.state_dict_type(unit, StateDictType.LOCAL_STATE_DICT):
        local = unit.state_dict()
        walk(unit, optimizer, rank, range(2, 4))
        unit.load_state_dict(local)
    assert_same(full_state(OURS, unit), expected)


@ranks(2)
def test_local_state_dicts_keep_every_shard_in_a_distributed_checkpoint(rank: int, tmp_path: Path):
    """Of plain tensors `torch.distributed.checkpoint` would keep one rank's."""
    unit, optimizer = stepped(OURS, rank)
    expected = full_state(OURS, unit)
    with quiet(), FSDP.state_dict_type(unit, StateDictType.LOCAL_STATE_DICT):
        dcp.save(unit.state_dict(), checkpoint_id=tmp_path / "dcp")
        walk(unit, optimizer, rank, range(2, 4))
        target = unit.state_dict()
        dcp.load(target, checkpoint_id=tmp_path / "dcp")
        unit.load_state_dict(target)
    assert_same(full_state(OURS, unit), expected)


@ranks(2)
def test_a_flat_parameter_of_fsdp1_is_refused_with_a_reason(rank: int):
    with quiet():
        real, _ = stepped(REAL, rank, use_orig_params=False)
        with REAL.FullyShardedDataParallel.state_dict_type(real, StateDictType.LOCAL_STATE_DICT):
            local = real.state_dict()
        unit, _ = stepped(OURS, rank, steps=0)
        with FSDP.state_dict_type(unit, StateDictType.LOCAL_STATE_DICT), pytest.raises(ShardError, match="flat"):
            unit.load_state_dict(local)


class Holder(nn.Module):
    """A plain module around a wrapped one, as scripts have them."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.model = unit
        self.extra = nn.Linear(2, 2)


@ranks(2)
def test_a_module_around_a_unit_saves_and_loads_it(rank: int):
    def run(api: Any) -> Any:
        torch.manual_seed(3)
        unit, _ = stepped(api, rank)
        holder = Holder(unit)
        state = {name: value.clone() for name, value in holder.state_dict().items()}
        torch.manual_seed(4)
        other = Holder(stepped(api, rank, steps=0)[0])
        other.load_state_dict(state)
        return state, {name: value.clone() for name, value in other.state_dict().items()}

    (real, _), (ours, again) = both(run)
    assert_same(ours, real)
    assert_same(again, real)


@ranks(2)
def test_missing_and_unexpected_names_are_the_models(rank: int):
    unit, _ = stepped(OURS, rank, steps=0)
    state = unit.state_dict()
    state["nonsense"] = state.pop("blocks.1.up.weight")
    result = unit.load_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["blocks.1.up.weight"], ["nonsense"])
    with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight"):
        unit.load_state_dict(state)


@ranks(2)
def test_a_state_dict_right_after_a_forward_has_the_present_weights(rank: int):
    unit, _ = stepped(OURS, rank)
    with torch.no_grad():
        unit(tokens(rank))
    expected = full_state(OURS, unit)
    loss_of(unit, tokens(rank))  # leaves the root gathered, as for a backward
    assert_same(full_state(OURS, unit), expected)
    loss_of(unit, tokens(rank))
    with FSDP.state_dict_type(unit, StateDictType.SHARDED_STATE_DICT):
        assert all(isinstance(value, DTensor) for name, value in unit.state_dict().items() if name != "scale")


@ranks(2)
def test_configs_of_another_kind_are_refused(rank: int):
    unit, _ = stepped(OURS, rank, steps=0)
    with pytest.raises(ConfigError, match="ShardedStateDictConfig"):
        FSDP.set_state_dict_type(unit, StateDictType.FULL_STATE_DICT, ShardedStateDictConfig())
    FSDP.set_state_dict_type(unit.blocks[0], StateDictType.SHARDED_STATE_DICT)
    with pytest.raises(ShardError, match="different kinds"):
        FSDP.get_state_dict_type(unit)


@ranks(2)
def test_a_trace_is_the_same_with_state_dicts_taken_on_the_way(rank: int):
    plain = trained(OURS, wrapped(OURS, model_for(OURS), auto_wrap_policy=BLOCKS), rank, steps=4)
    unit = wrapped(OURS, model_for(OURS), auto_wrap_policy=BLOCKS)
    optimizer = torch.optim.AdamW(unit.parameters(), lr=0.01)
    losses = []
    for step in range(4):
        losses += walk(unit, optimizer, rank, range(10 * step, 10 * step + 1))
        unit.load_state_dict(unit.state_dict())
        optimizer_state(OURS, unit, optimizer)
    assert losses == plain.losses


@pytest.mark.parametrize("is_inside", [False, True])
@ranks(2)
def test_dcps_state_dict_helpers_take_a_wrapped_model(rank: int, is_inside: bool):
    unit, optimizer = stepped(OURS, rank)
    model: nn.Module = Holder(unit) if is_inside else unit
    start = "model." if is_inside else ""
    whole = {start + name: value for name, value in full_state(OURS, unit).items()}
    optimizer.zero_grad()
    model_state, optimizer_states = get_state_dict(model, optimizer)
    assert isinstance(model_state[f"{start}gain"], DTensor)
    assert {name for name in model_state if "extra" not in name} == whole.keys()
    assert isinstance(optimizer_states["state"][f"{start}blocks.0.up.weight"]["exp_avg"], DTensor)
    fresh, fresh_optimizer = stepped(OURS, rank, steps=0)
    other: nn.Module = Holder(fresh) if is_inside else fresh
    copied = copy.deepcopy(optimizer_states)  # DCP hands out the optimizer's own tensors, and takes them as they are
    set_state_dict(other, fresh_optimizer, model_state_dict=model_state, optim_state_dict=copied)
    assert_same({start + name: value for name, value in full_state(OURS, fresh).items()}, whole)
    expected = walk(unit, optimizer, rank, range(2, 4))
    assert walk(fresh, fresh_optimizer, rank, range(2, 4)) == pytest.approx(expected, rel=1e-6)


@ranks(2)
def test_dcps_helpers_gather_and_send_whole_state(rank: int):
    unit, optimizer = stepped(OURS, rank)
    optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_states = get_state_dict(unit, optimizer, options=options)
    assert bool(model_state) == (rank == 0)
    whole = full_state(OURS, unit)
    if rank == 0:
        assert_same(dict(model_state), whole)
    fresh, fresh_optimizer = stepped(OURS, rank, steps=0)
    sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(fresh, model_state, options=sent)
    set_optimizer_state_dict(fresh, fresh_optimizer, optimizer_states, options=sent)
    assert_same(full_state(OURS, fresh), whole)
    moments = [state["exp_avg"].full_tensor() for state in fresh_optimizer.state.values()]
    assert len(moments) == len(optimizer.state)
    for moment, state in zip(moments, optimizer.state.values(), strict=True):
        torch.testing.assert_close(moment, state["exp_avg"].full_tensor())


@ranks(2)
def test_a_state_dict_inside_summon_is_the_one_outside(rank: int):
    unit, _ = stepped(OURS, rank)
    expected = full_state(OURS, unit)
    with FSDP.summon_full_params(unit):
        assert_same(full_state(OURS, unit), expected)


@ranks(2)
@pytest.mark.parametrize("is_named", [False, True])
def test_optimizer_state_without_groups_and_under_names(rank: int, is_named: bool):
    """As `KeyedOptimizer` and `NamedOptimizer` have it."""

    def run(api: Any) -> Any:
        unit, optimizer = stepped(api, rank)
        given = optimizer.state_dict()
        names = {id(parameter): name for name, parameter in unit.named_parameters()}
        held = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        if is_named:
            given["state"] = {held[number]: state for number, state in given["state"].items()}
        given.pop("param_groups")
        configs = (api.FullStateDictConfig(), api.FullOptimStateDictConfig(offload_to_cpu=False))
        api.FullyShardedDataParallel.set_state_dict_type(unit, StateDictType.FULL_STATE_DICT, *configs)
        saved = api.FullyShardedDataParallel.optim_state_dict(unit, optimizer, given)
        loaded = api.FullyShardedDataParallel.optim_state_dict_to_load(unit, optimizer, saved, is_named)
        assert loaded.keys() == {"state"}
        expected = set(held) if is_named else set(range(len(held)))
        # FSDP1 has state for the parameters of which this rank holds a part.
        assert loaded["state"].keys() <= expected
        assert api is REAL or loaded["state"].keys() == expected
        return saved

    real, ours = both(run)
    assert ours.keys() == real.keys()
    assert ours["state"].keys() == real["state"].keys()
    for name, state in real["state"].items():
        assert_same(ours["state"][name], state)
