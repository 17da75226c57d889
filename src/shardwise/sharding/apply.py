"""shard(): carry a plan out on a model, in place. Decides nothing."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.optim import Optimizer

from shardwise import compat
from shardwise.config.schema import ShardConfig
from shardwise.planning.plan import Group, Plan, PlannedParameter
from shardwise.planning.planner import plan as make_plan
from shardwise.sharding.activation import checkpoint_activations
from shardwise.sharding.agreement import agree_on_plan, agree_on_weights, check_fits, plan_together
from shardwise.sharding.assigning import watch_assignments
from shardwise.sharding.compiling import compile_blocks
from shardwise.sharding.entering import Entry, RootEntry, guard_outside_call
from shardwise.sharding.gradients import BackwardEnd, UnusedParameters, watch_zero_grad
from shardwise.sharding.inputs import Casts, register_post_backward
from shardwise.sharding.mesh import data_parallel_mesh, default_mesh
from shardwise.sharding.parts import PartsEntry
from shardwise.sharding.prefetching import set_prefetch
from shardwise.sharding.registry import ShardedState, announce, remember
from shardwise.sharding.replicated import Replicated
from shardwise.sharding.repointing import remember_parameters, repoint
from shardwise.sharding.watching import watch_optimizers

M = TypeVar("M", bound=nn.Module)


def shard(
    model: M,
    config: ShardConfig | None = None,
    *,
    mesh: DeviceMesh | None = None,
    optimizers: Sequence[Optimizer] | Optimizer = (),
    plan: Plan | None = None,
    example_inputs: Any = None,
) -> M:
    """Shard `model` in place and return it, now an `FSDPModule`.

    Sharding replaces every parameter by a DTensor; optimizers passed here are pointed at the new ones, and an optimizer
    left behind raises at its first `step()`.

    Args:
        model: On the meta device (recommended; call `materialize` next) or already initialised alike on every rank.
        config: What to decide and how; the default decides everything.
        mesh: From `init_distributed`. Its device is where the shards will live.
        optimizers: Built earlier on this model's parameters.
        plan: From `plan()`, to carry out as it is; computed here when absent.
        example_inputs: Arguments of `forward`, to observe real calls on fake tensors while planning.

    Raises:
        PlanError: The model cannot be sharded as asked; nothing has been changed.
        ShardError: Ranks hold different plans or weights, or an optimizer belongs to another model.
        EnvironmentProblem: The installed torch lacks something that sharding needs.

    Ranks:
        Collective. Call on every rank of `mesh`.
    """
    compat.check_torch()
    mesh = data_parallel_mesh(mesh or default_mesh())
    optimizers = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
    if plan is None:
        plan = plan_together(lambda: make_plan(model, config, mesh=mesh, example_inputs=example_inputs), mesh)
    check_fits(plan, model, mesh)
    agree_on_plan(plan, mesh)
    agree_on_weights(model, mesh)
    remembered = remember_parameters(model, optimizers)
    _change_blocks(model, config or ShardConfig(), plan)
    replaced = list(model.parameters())
    _prepare_storage(model, plan)
    modules = dict(model.named_modules(remove_duplicate=False))
    aside = _set_aside(model, plan)
    for group in plan.groups:  # children first, root last
        _shard_group(group, modules, model, mesh, aside)
    state = ShardedState(plan=plan, mesh=mesh)
    _wire(model, plan, modules, mesh, state)
    remember(model, state)
    repoint(optimizers, remembered, model)
    watch_optimizers(model, replaced)
    watch_assignments(model)
    watch_zero_grad()
    announce(model)
    return model


def _change_blocks(model: nn.Module, config: ShardConfig, plan: Plan) -> None:
    """Recomputation inside, compilation around it, sharding outside both: the only order that works."""
    if config.activations != "keep":
        checkpoint_activations(model, config.activations, config=plan)
    if config.compile:
        compile_blocks(model, config=plan)


def _prepare_storage(model: nn.Module, plan: Plan) -> None:
    """Give every parameter the storage the plan states: one object per tie, row-major, upcast where asked."""
    for planned in plan.parameters:
        parameter = model.get_parameter(planned.fqn)
        for alias in planned.aliases:
            owner, _, name = alias.rpartition(".")
            model.get_submodule(owner)._parameters[name] = parameter
        if planned.make_contiguous:
            parameter.data = parameter.data.contiguous()
        if planned.upcast_from:
            parameter.data = parameter.data.to(getattr(torch, planned.dtype))


def _set_aside(model: nn.Module, plan: Plan) -> set[nn.Parameter]:
    """Parameters that `fully_shard` must leave alone."""
    return {model.get_parameter(planned.fqn) for planned in (*plan.replicated, *plan.ignored)}


def _shard_group(
    group: Group, modules: dict[str, nn.Module], model: nn.Module, mesh: DeviceMesh, aside: set[nn.Parameter]
) -> None:
    members = [modules[name] for name in group.modules]
    policy: OffloadPolicy = CPUOffloadPolicy(pin_memory=group.pin_memory) if group.offload else OffloadPolicy()
    fully_shard(
        members[0] if len(members) == 1 else members,  # pyrefly: ignore[no-matching-overload]
        mesh=mesh,
        reshard_after_forward=group.reshard_after_forward,
        shard_placement_fn=_placement_function(group, model),
        mp_policy=MixedPrecisionPolicy(
            param_dtype=_dtype(group.param_dtype),
            reduce_dtype=_dtype(group.reduce_dtype),
            cast_forward_inputs=False,  # `Casts` does it
        ),
        offload_policy=policy,
        ignored_params=aside,
    )


def _placement_function(group: Group, model: nn.Module) -> Callable[[nn.Parameter], Shard | None] | None:
    dims = {id(model.get_parameter(p.fqn)): p.shard_dim for p in group.parameters if p.shard_dim}
    if not dims:
        return None
    return lambda parameter: Shard(dims[id(parameter)]) if id(parameter) in dims else None


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _wire(model: nn.Module, plan: Plan, modules: dict[str, nn.Module], mesh: DeviceMesh, state: ShardedState) -> None:
    """Put our hooks around FSDP2's: entries, held groups, gradients outside groups, prefetching."""
    compat.mend_accumulation(model)
    replicated = _place_outside(model, plan, modules, mesh)
    _wire_entries(model, plan, modules, replicated, state)
    unused = UnusedParameters([g for group in plan.groups if group.reduce_unused for g in _fsdp_groups(group, modules)])
    state.forget.append(unused.forget)
    places = [_places(planned, modules)[0] for planned in (*plan.replicated, *plan.ignored)]
    BackwardEnd(model, mesh, places, unused, state.before_sum)
    set_prefetch(plan, modules)


def _place_outside(model: nn.Module, plan: Plan, modules: dict[str, nn.Module], mesh: DeviceMesh) -> Replicated:
    """Bring the parameters that are in no group to the device, replicated ones as DTensors."""
    device = compat.compute_device(model)
    replicated = Replicated()
    for planned in plan.replicated:
        replicated.add(_places(planned, modules), mesh, device)
    for planned in plan.ignored:
        parameter = model.get_parameter(planned.fqn)
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    return replicated


def _wire_entries(
    model: nn.Module, plan: Plan, modules: dict[str, nn.Module], replicated: Replicated, state: ShardedState
) -> None:
    """Count entries into each group, by its forward and by the methods the plan names."""
    for fsdp_group in compat.param_groups(model):
        compat.replace_post_backward_hook(fsdp_group, register_post_backward)
    held = [g for group in plan.groups if group.held for g in _fsdp_groups(group, modules)]
    parts = [
        PartsEntry([modules[name] for name in group.modules], model, _casts(group))
        for group in plan.groups
        if len(group.modules) > 1
    ]
    state.forget += [entry.forget for entry in parts]
    branches = any(group.held and group.reduce_unused for group in plan.groups)
    root = RootEntry(model, _casts(plan.root), held, parts, replicated, branches=branches)
    for group in plan.groups:
        single = group is not plan.root and len(group.modules) == 1
        entry = Entry(modules[group.modules[0]], model, _casts(group)) if single else root
        for name in group.entry_points:
            owner, _, method = name.rpartition(":")
            entry.add_method(modules[owner], method)
    for name in plan.outer_modules:
        guard_outside_call(root, modules[name])


def _casts(group: Group) -> Casts:
    return Casts(_dtype(group.param_dtype) if group.cast_inputs else None, _dtype(group.output_dtype))


def _places(planned: PlannedParameter, modules: dict[str, nn.Module]) -> list[tuple[nn.Module, str]]:
    """Every module and attribute under which a parameter is registered."""
    split = [name.rpartition(".") for name in (planned.fqn, *planned.aliases)]
    return [(modules[owner], name) for owner, _, name in split]


def _fsdp_groups(group: Group, modules: dict[str, nn.Module]) -> list[Any]:
    return compat.state_param_groups(compat.fsdp_state(modules[group.modules[0]]))
