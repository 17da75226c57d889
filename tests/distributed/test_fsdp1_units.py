"""Units of shardwise.fsdp1: wrapping by hand, whole parameters, ignored parts, initial values, what is refused."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import BackwardPrefetch, FSDPModule, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from shardwise.errors import ConfigError, ShardError
from shardwise.fsdp1 import FlatParameter
from shardwise.fsdp1 import FullyShardedDataParallel as FSDP
from shardwise.fsdp1.wrap import enable_wrap, wrap
from shardwise.sharding.registry import sharded_state
from tests.by_hand import Block, assert_same, loss_of, tiny, tokens
from tests.fsdp1_pairs import CPU, EXACT, OURS, REAL, assert_alike, both, full_state, model_for, quiet, trained, wrapped
from tests.ranks import ranks

BLOCKS = ModuleWrapPolicy({Block})


def step(unit: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int = 0) -> float:
    optimizer.zero_grad()
    loss = loss_of(unit, tokens(rank, number))
    loss.backward()
    optimizer.step()
    return loss.item()


@ranks(2)
def test_a_unit_is_what_scripts_ask_whether_it_is(rank: int):
    model = tiny()
    unit = FSDP(model, auto_wrap_policy=BLOCKS)
    assert isinstance(unit, FSDP)
    assert isinstance(unit, FSDPModule)
    assert unit.module is model is unit._fsdp_wrapped_module
    assert unit.gain is model.gain
    assert [type(block.module) for block in unit.blocks] == [Block, Block]
    assert FSDP.fsdp_modules(unit) == [unit, *unit.blocks]
    assert FSDP.fsdp_modules(unit, root_only=True) == [unit]
    assert FSDP.fsdp_modules(nn.ModuleList([unit])) == [unit, *unit.blocks]
    assert unit.check_is_root()
    assert not unit.blocks[0].check_is_root()
    assert (unit.rank, unit.world_size) == (rank, 2)
    assert str(unit).startswith("FullyShardedDataParallel(\n  (_fsdp_wrapped_module): Tiny(")
    assert not any(isinstance(parameter, FlatParameter) for parameter in unit.parameters())
    assert all(isinstance(parameter, DTensor) for parameter in unit.parameters())


@ranks(2)
def test_a_unit_shows_the_arguments_it_was_given(rank: int):
    unit = wrapped(OURS, tiny(), auto_wrap_policy=ModuleWrapPolicy({Block}), forward_prefetch=True)
    for each in FSDP.fsdp_modules(unit):
        assert each.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
        assert (each.forward_prefetch, each.limit_all_gathers) == (True, True)


@ranks(2)
def test_parameters_beside_units_may_stand_in_another_order_on_each_rank(rank: int):
    """What no rank averages is refused only where gradients differ, however the optimizer lists them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), FSDP(nn.Linear(4, 4), device_id=CPU), nn.Linear(4, 4))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters[:: -1 if rank else 1], lr=0.1)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    model(torch.full((2, 4), 1.0 + rank)).square().sum().backward()
    with pytest.raises(ShardError, match="another gradient on each rank"):
        optimizer.step()


@ranks(2)
def test_flat_parameter_internals_are_refused_with_a_reason(rank: int):
    unit = FSDP(tiny())
    assert not hasattr(unit, "_handle")
    assert getattr(unit, "_flat_param", None) is None
    with pytest.raises(ShardError, match="FSDP2 shards every parameter by itself"):
        _ = unit._handles
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = unit.nonsense


@ranks(2)
def test_wrapping_by_hand_from_the_inside_out_trains_as_fsdp1(rank: int):
    def run(api: Any) -> Any:
        model = model_for(api)
        for index, block in enumerate(model.blocks):
            model.blocks[index] = api.FullyShardedDataParallel(block, device_id=CPU)
        unit = api.FullyShardedDataParallel(model, device_id=CPU)
        return trained(api, unit, rank, clip=0.5)

    real, ours = both(run)
    assert_alike(ours, real)


class Annotated(nn.Module):
    """Wraps its parts itself where it is built inside `enable_wrap`."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.first = wrap(nn.Linear(4, 4))
        self.second = wrap(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@ranks(2)
def test_enable_wrap_and_wrap_make_units(rank: int):
    torch.manual_seed(0)
    with enable_wrap(wrapper_cls=FSDP, device_id=CPU):
        model = wrap(Annotated(wrap))
    assert [type(module) is not nn.Linear for module in (model.first, model.second)] == [True, True]
    assert model.second.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert isinstance(Annotated(wrap).first, nn.Linear)
    torch.manual_seed(0)
    plain = Annotated(lambda module, **_: module)
    x = torch.ones(2, 4)
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
@ranks(2)
def test_activation_checkpointing_after_wrapping_goes_inside_as_in_fsdp1(rank: int, kind: str, strategy: str):
    implementation = CheckpointImpl.REENTRANT if kind == "reentrant" else CheckpointImpl.NO_REENTRANT

    def run(api: Any) -> Any:
        settings = {"auto_wrap_policy": BLOCKS, "sharding_strategy": ShardingStrategy[strategy]}
        unit = wrapped(api, model_for(api), **settings)
        apply_activation_checkpointing(
            unit,
            checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=implementation),
            check_fn=lambda module: isinstance(module, Block),
        )
        assert type(unit.blocks[0]._fsdp_wrapped_module).__name__ == "CheckpointWrapper"
        assert isinstance(unit.blocks[0].module, Block)
        return trained(api, unit, rank, clip=0.5), sorted(unit.state_dict())

    (real, real_names), (ours, our_names) = both(run)
    assert our_names == real_names
    assert_alike(ours, real)


@ranks(2)
def test_activation_checkpointing_before_wrapping_trains_as_fsdp1(rank: int):
    def run(api: Any) -> Any:
        model = model_for(api)
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        return trained(api, wrapped(api, model, auto_wrap_policy=BLOCKS), rank)

    real, ours = both(run)
    assert_alike(ours, real)


@pytest.mark.parametrize("how", ["modules", "states as modules", "states as parameters"])
@ranks(2)
def test_ignored_parts_stay_plain_and_are_not_averaged(rank: int, how: str):
    def run(api: Any) -> Any:
        model = model_for(api)
        unit_of = functools.partial(api.FullyShardedDataParallel, device_id=CPU, auto_wrap_policy=BLOCKS)
        if how == "modules":
            unit = unit_of(model, ignored_modules=[model.frozen])
        elif how == "states as modules":
            unit = unit_of(model, ignored_states=[model.frozen])
        else:
            unit = unit_of(model, ignored_states=list(model.frozen.parameters()), use_orig_params=True)
        optimizer = torch.optim.SGD(unit.parameters(), lr=0.1)
        losses = [step(unit, optimizer, rank, number) for number in range(3)]
        assert type(unit.frozen.weight) is nn.Parameter
        return losses, full_state(api, unit)

    real, ours = both(run)
    assert ours[0] == pytest.approx(real[0], rel=1e-6)
    assert_same(ours[1], real[1])


@ranks(2)
def test_inner_units_hand_on_what_they_ignore(rank: int):
    model = model_for(OURS)
    model.blocks[0] = FSDP(model.blocks[0], ignored_modules=[model.blocks[0].norm])
    unit = FSDP(model)
    assert type(unit.blocks[0].norm.weight) is nn.Parameter
    assert isinstance(unit.blocks[0].up.weight, DTensor)


@ranks(2)
def test_sync_module_states_sends_rank_zeros_values(rank: int):
    """FSDP1 needs an accelerator for this."""
    model = tiny(seed=rank)
    model.scale += rank
    unit = FSDP(model, auto_wrap_policy=BLOCKS, sync_module_states=True)
    assert_same(full_state(OURS, unit), tiny(seed=0).state_dict())


@ranks(4)
def test_sync_module_states_reaches_every_copy(rank: int):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    strategy = ShardingStrategy.HYBRID_SHARD
    unit = FSDP(tiny(seed=rank), device_mesh=mesh, sharding_strategy=strategy, sync_module_states=True)
    assert_same(full_state(OURS, unit), tiny(seed=0).state_dict())


@ranks(2)
def test_meta_on_the_other_ranks_with_param_init_fn_and_sync(rank: int):
    """The common way to load a large model on rank 0 only."""
    with torch.device("meta" if rank else "cpu"):
        model = tiny() if rank == 0 else type(tiny())()
    unit = FSDP(
        model,
        auto_wrap_policy=BLOCKS,
        sync_module_states=True,
        param_init_fn=(lambda module: module.to_empty(device=CPU, recurse=False)) if rank else None,
    )
    state = full_state(OURS, unit)
    assert_same(state, tiny().state_dict())


class Made(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 3))
        self.scale = nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def by_hand_init(module: nn.Module) -> None:
    module.to_empty(device=CPU, recurse=False)
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter)


@pytest.mark.parametrize("init", [None, by_hand_init])
@ranks(2)
def test_a_model_on_meta_gets_the_values_that_fsdp1_gives_it(rank: int, init: Any):
    def run(api: Any) -> Any:
        with torch.device("meta"):
            model = Made()
        torch.manual_seed(5)
        unit = api.FullyShardedDataParallel(
            model, device_id=CPU, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), param_init_fn=init
        )
        return full_state(api, unit)

    real, ours = both(run)
    assert_same(ours, real)


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


@ranks(2)
def test_a_module_on_meta_without_reset_parameters_is_refused(rank: int):
    with torch.device("meta"):
        model = NoReset()
    with pytest.raises(ShardError, match="no reset_parameters"):
        FSDP(model)


@ranks(2)
def test_an_optimizer_built_before_wrapping_steps_the_shards(rank: int):
    """With `use_orig_params=True` FSDP1 kept the parameter objects."""

    def run(api: Any) -> Any:
        model = model_for(api)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        unit = api.FullyShardedDataParallel(model, device_id=CPU, auto_wrap_policy=BLOCKS, use_orig_params=True)
        losses = []
        for number in range(3):
            losses.append(step(unit, optimizer, rank, number))
            scheduler.step()
        return losses, full_state(api, unit)

    real, ours = both(run)
    assert ours[0] == pytest.approx(real[0], rel=1e-6)
    assert_same(ours[1], real[1])


@ranks(2)
def test_unused_parameters_have_zero_gradients_as_in_a_flat_parameter(rank: int):
    """Rank 0 leaves the last block out: in FSDP1 its part of the flat gradient is zero there."""

    def run(api: Any) -> Any:
        unit = wrapped(api, model_for(api), use_orig_params=True)
        optimizer = torch.optim.AdamW(unit.parameters(), lr=0.01, weight_decay=0.5)
        for skip in ((1,) if rank == 0 else (), (1,)):
            optimizer.zero_grad()
            loss_of(unit, tokens(rank), skip=skip).backward()
            optimizer.step()
        return full_state(api, unit)

    real, ours = both(run)
    assert_same(ours, real)


@ranks(2)
def test_a_unit_that_does_not_run_has_no_gradient(rank: int):
    def run(api: Any) -> Any:
        unit = wrapped(api, model_for(api), use_orig_params=True, auto_wrap_policy=BLOCKS)
        optimizer = torch.optim.AdamW(unit.parameters(), lr=0.01, weight_decay=0.5)
        for skip in ((), (1,)):
            optimizer.zero_grad()
            loss_of(unit, tokens(rank), skip=skip).backward()
            optimizer.step()
        return full_state(api, unit)

    real, ours = both(run)
    assert_same(ours, real)


@ranks(2)
def test_evaluation_between_backward_and_step_does_not_hide_the_step(rank: int):
    plain, plain_optimizer = (unit := wrapped(OURS, tiny())), torch.optim.AdamW(unit.parameters(), lr=0.01)
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        unit = wrapped(OURS, tiny(), auto_wrap_policy=BLOCKS, sharding_strategy=strategy)
        optimizer = torch.optim.AdamW(unit.parameters(), lr=0.01)
        plain = wrapped(OURS, tiny(), auto_wrap_policy=BLOCKS)
        plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
        for number in range(3):
            step(plain, plain_optimizer, rank, number)
            optimizer.zero_grad()
            loss_of(unit, tokens(rank, number)).backward()
            with torch.no_grad():
                unit(tokens(rank))
            optimizer.step()
        assert_same(full_state(OURS, unit), full_state(OURS, plain))


@ranks(2)
def test_backward_post_and_none_are_said_once(rank: int):
    from shardwise.fsdp1 import initialising

    initialising._SAID.clear()
    with pytest.warns(UserWarning, match="BACKWARD_POST"):
        FSDP(tiny(), backward_prefetch=BackwardPrefetch.BACKWARD_POST)
    FSDP(tiny(), backward_prefetch=BackwardPrefetch.BACKWARD_POST)  # a warning would be an error here
    with pytest.warns(UserWarning, match="backward_prefetch=None"):
        FSDP(tiny(), backward_prefetch=None)


@ranks(2)
def test_wrong_arguments_are_refused(rank: int):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    group = dist.group.WORLD
    hybrid = ShardingStrategy.HYBRID_SHARD
    with pytest.raises(ConfigError, match="both are given"):
        FSDP(tiny(), process_group=group, device_mesh=mesh)
    with pytest.raises(ConfigError, match="one process group"):
        FSDP(tiny(), process_group=group, sharding_strategy=hybrid)
    with pytest.raises(ConfigError, match="mesh of 1 axis"):
        FSDP(tiny(), device_mesh=mesh, sharding_strategy=hybrid)
    with pytest.raises(ConfigError, match="sharding_strategy is 'full'"):
        FSDP(tiny(), sharding_strategy="full")
    model = tiny()
    model.blocks[0] = FSDP(model.blocks[0])
    with pytest.raises(ShardError, match=r"blocks\.0 is wrapped already"):
        FSDP(model, auto_wrap_policy=BLOCKS)
    with pytest.raises(ConfigError, match="ignored module is wrapped"):
        FSDP(model, ignored_modules=[model.blocks[0]])


@ranks(2)
def test_methods_of_the_whole_model_are_refused_on_inner_units(rank: int):
    unit = FSDP(tiny(), auto_wrap_policy=BLOCKS)
    assert unit.check_is_root()
    with pytest.raises(ShardError, match="inner unit"), unit.blocks[0].no_sync():
        pass
    with pytest.raises(ShardError, match="inner unit"):
        unit.blocks[0].clip_grad_norm_(1.0)


@ranks(2)
def test_a_step_that_fails_is_forgotten(rank: int):
    unit = wrapped(OURS, tiny(), auto_wrap_policy=BLOCKS)
    reference = wrapped(OURS, tiny(), auto_wrap_policy=BLOCKS)
    with pytest.raises(IndexError):
        unit(torch.full((2, 3), 99))
    for model in (unit, reference):
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), rank)
    assert_same(full_state(OURS, unit), full_state(OURS, reference), **EXACT)


@ranks(2)
def test_deprecated_torch_is_not_needed(rank: int):
    """Nothing of FSDP1's own machinery is built."""
    unit = FSDP(tiny(), auto_wrap_policy=BLOCKS)
    assert not any(isinstance(module, REAL.FullyShardedDataParallel) for module in unit.modules())
    with quiet():
        assert REAL.FullyShardedDataParallel.fsdp_modules(unit) == []


@pytest.mark.slow
@ranks(2, timeout_s=180)
def test_a_compiled_unit_trains_as_the_same_unit_without(rank: int):
    losses, states = [], []
    for is_compiled in (False, True):
        unit = wrapped(OURS, tiny(), auto_wrap_policy=BLOCKS)
        model = torch.compile(unit, backend="aot_eager") if is_compiled else unit
        optimizer = torch.optim.AdamW(unit.parameters(), lr=0.01)
        with quiet():  # dynamo looks at gradients of tensors that have none
            losses.append([step(model, optimizer, rank, number) for number in range(3)])
        states.append(full_state(OURS, unit))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert_same(states[1], states[0])


@ranks(2)
def test_a_unit_says_what_it_does_as_a_plan(rank: int):
    model = model_for(OURS)
    unit = FSDP(model, auto_wrap_policy=BLOCKS, ignored_states=[model.frozen])
    plan = unit.plan
    assert [group.modules for group in plan.groups] == [("blocks.0",), ("blocks.1",), ("",)]
    assert [group.reshard_after_forward for group in plan.groups] == [True, True, False]
    assert {parameter.fqn for parameter in plan.ignored} == {"frozen.weight", "frozen.bias"}
    assert {parameter.fqn for parameter in plan.parameters} == {name for name, _ in tiny().named_parameters()}
    assert [parameter.aliases for parameter in plan.root.parameters] == [("head.weight",), ()]
    assert "FSDP1's FULL_SHARD" in str(plan)
    loss_of(unit, tokens(rank)).backward()
    state = sharded_state(unit)
    assert state is not None
    assert state.plan == plan


class MyFSDP(FSDP):
    """Scripts subclass it to add a method."""

    def num_units(self) -> int:
        return len(self.fsdp_modules(self))


@ranks(2)
def test_a_subclass_keeps_its_name_and_methods(rank: int):
    unit = MyFSDP(tiny(), auto_wrap_policy=BLOCKS)
    assert unit.num_units() == 3
    assert (type(unit).__name__, type(unit.blocks[0]).__name__) == ("MyFSDP", "FullyShardedDataParallel")
    loss_of(unit, tokens(rank)).backward()
