"""shard(): apply a plan, without making decisions."""

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.optim import Optimizer

from shardwise import compat
from shardwise.config.schema import ShardConfig
from shardwise.distributed.agreement import agree_on, gather_objects, run_on_all
from shardwise.distributed.mesh import (
    default_mesh,
    expert_mesh,
    finish_collectives_at_exit,
    fsdp_mesh,
    gradient_mesh,
    mesh_axes,
    model_mesh,
    sub_mesh,
)
from shardwise.errors import PlanError, ShardError
from shardwise.planning.calls import is_within
from shardwise.planning.plan import Group, Plan, PlannedParameter
from shardwise.planning.planner import plan as make_plan
from shardwise.planning.planner import refuse_sharded
from shardwise.planning.settings import dtype_name
from shardwise.sharding.blocks import checkpoint_activations, compile_blocks, refuse_budget
from shardwise.sharding.float8 import GatheredScales, convert_linears, import_torchao
from shardwise.sharding.full_params import reshard
from shardwise.sharding.hooks.forward_hooks import Casts, ForwardHooks, PartsForwardHooks, Replicated, RootForwardHooks
from shardwise.sharding.hooks.gradients import (
    BackwardEnd,
    ParameterHooks,
    UnusedParameters,
    copy_hooks,
    step_in_backward,
    watch_zero_grad,
)
from shardwise.sharding.hooks.graph_calls import watch_backward
from shardwise.sharding.hooks.outside import register_dtensor_handlers
from shardwise.sharding.hooks.parameter_writes import watch_writes
from shardwise.sharding.hooks.watching import watch_by_default
from shardwise.sharding.inventory import canonical_name, class_name, fingerprint
from shardwise.sharding.parallel.context_parallel import apply_context_parallel, replace_root_forward
from shardwise.sharding.parallel.expert_parallel import divide_experts
from shardwise.sharding.parallel.tensor_parallel import apply_tensor_parallel, hook_tensor_parallel
from shardwise.sharding.registry import ShardedState, on_recover, remember
from shardwise.sharding.repointing import (
    around_steps,
    follow,
    refuse_replaced,
    remember_parameters,
    repoint,
    watch_optimizers,
)

_SAMPLES = 64
"""Number of elements compared per parameter: enough to distinguish two random draws, cheap for any size."""


def check_fits(plan: Plan, model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise unless `plan` was made for this model and mesh.

    Raises:
        PlanError: The model is already sharded, or its parameters or the mesh sizes differ from the plan's.
    """
    refuse_sharded(model, mesh)
    sizes = mesh_axes(mesh)[0]
    if {each for each in sizes.items() if each[1] > 1} != {each for each in dict(plan.axes).items() if each[1] > 1}:
        raise PlanError(
            f"the plan is for a mesh of {dict(plan.axes)}, this one has {sizes}",
            why="shard dimensions and policies were chosen for those sizes",
            fix="plan(model, config, mesh=mesh) with the mesh of this run",
        )
    planned = {name: parameter for parameter in plan.parameters for name in (parameter.fqn, *parameter.aliases)}
    present = dict(model.named_parameters(remove_duplicate=False))
    odd = sorted(planned.keys() ^ present.keys())
    what = f"the plan and the model differ in {len(odd)} parameters, first {odd[0]!r}" if odd else ""
    for name, parameter in present.items() if not odd else ():
        found = f"{list(parameter.shape)} {dtype_name(parameter.dtype)}"
        expected = f"{list(planned[name].shape)} {planned[name].upcast_from or planned[name].dtype}"
        if found != expected:
            odd, what = [name], f"{name!r} is {found}, planned as {expected}"
            break
    if odd:
        raise PlanError(
            what,
            where=odd[0],
            why="a plan is applied exactly, parameter by parameter",
            fix="plan(model, ...) again for this model",
        )


def agree_on_plan_and_weights(plan: Plan, model: nn.Module, mesh: DeviceMesh) -> str:
    """Raise on every rank, with the difference, unless all ranks have the same plan and the same weights.

    A sample of each parameter is compared. Each rank keeps its shard of its own copy, so ranks with different
    initial values would silently train a mixture of them.

    Returns:
        Names of the parameters with a fingerprint of each sample.

    Ranks:
        Collective.
    """
    weights = "\n".join(f"{name} {_fingerprint(parameter)}" for name, parameter in model.named_parameters())
    fix = (
        "seed every rank alike before building the model, build it on meta and call materialize(), or call "
        "materialize(model, sync_from_rank_zero=True) before sharding"
    )
    agree_on(plan.to_json(indent=1), "the sharding plan", group=mesh)
    agree_on(weights, "the model's weights", fix=fix, group=mesh)
    return weights


def _fingerprint(parameter: torch.Tensor) -> str:
    if parameter.is_meta:
        return "meta"
    if hasattr(parameter, "fsdp_pre_all_gather"):
        inner = [value for value in vars(parameter).values() if isinstance(value, torch.Tensor)]
        return " ".join(map(_fingerprint, inner))
    if type(parameter) not in (nn.Parameter, torch.Tensor) or parameter.numel() == 0:
        return "-"
    flat = parameter.detach().reshape(-1) if parameter.is_contiguous() else parameter.detach().contiguous().view(-1)
    return f"{int(fingerprint(flat[:: max(flat.numel() // _SAMPLES, 1)][:_SAMPLES])):x}"


def set_prefetch(plan: Plan, modules: dict[str, Any]) -> None:
    """Set the groups that each group prefetches."""
    for group in plan.groups:
        module = modules[group.modules[0]]
        if group.forward_prefetch:
            module.set_modules_to_forward_prefetch([modules[name] for name in group.forward_prefetch])
        if group.backward_prefetch:
            module.set_modules_to_backward_prefetch([modules[name] for name in group.backward_prefetch])
    if plan.early_root:  # unshard the root's parameters after the optimizer step, not when forward begins
        _unshard_after_steps(modules[plan.root.modules[0]])


def _unshard_after_steps(root: Any) -> None:
    reference = weakref.ref(root)

    def unshard(_: Any) -> None:
        if (root := reference()) is not None and all(map(compat.is_resharded, compat.groups_of(root))):
            root.unshard(async_op=True)

    # The next forward would use parameters unsharded early instead of newly loaded weights.
    root.register_load_state_dict_pre_hook(lambda root, *_: reshard(root))
    weakref.finalize(root, around_steps(compat.groups_of(root), after=unshard))


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

    Sharding replaces every parameter by a DTensor; optimizers passed here are repointed to the new parameters, and any
    other optimizer of the old ones raises at its first `step()`.

    Args:
        model: On the meta device (recommended; call `materialize` next) or initialized identically on every rank.
        config: Sharding settings; by default all decisions are automatic.
        mesh: From `init_distributed`. Shards are stored on its device.
        optimizers: Existing optimizers of this model's parameters.
        plan: From `plan()`, applied unchanged; computed here by default. If `config` is given too, its
            `activations` and `compile` are used.
        example_inputs: Arguments of `forward`, to observe real calls on fake tensors while planning.

    Raises:
        PlanError: The model cannot be sharded as asked; nothing has been changed.
        ShardError: Ranks have different plans or weights, or an optimizer belongs to another model.
        EnvironmentProblem: The installed torch lacks a required feature.

    Ranks:
        Collective. Call on every rank of `mesh`.
    """
    compat.check_torch()
    finish_collectives_at_exit()
    refuse_replaced(model)
    stages, mesh = sub_mesh(mesh := mesh or default_mesh(), ("pipeline",)), model_mesh(mesh)
    optimizers = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
    if plan is None:
        plan = run_on_all(lambda: make_plan(model, config, mesh=mesh, example_inputs=example_inputs), mesh)
    else:
        check_fits(plan, model, mesh)
    if plan.float8:
        import_torchao()  # before any change
    blocks = plan if config is None else config
    refuse_budget(blocks.activations, compiles=blocks.compile is True)
    weights = agree_on_plan_and_weights(plan, model, mesh)
    if stages is not None and len(set(gather_objects(weights, group=stages.get_group()))) == 1:
        warnings.warn(
            f"the {stages.size()} ranks along the pipeline axis hold the same {plan.model}: their gradients are "
            "not reduced. shardwise.pipeline(model, ...) divides a model into stages",
            stacklevel=2,
        )
    remembered = remember_parameters(model, optimizers)
    replaced = dict(model.named_parameters(remove_duplicate=False))
    _prepare_storage(model, plan)  # ties
    # The only order that works: float8 innermost, then tensor, expert and context parallelism, recomputation,
    # compilation, and sharding outermost.
    convert_linears(model, plan)
    if (experts := expert_mesh(mesh)) is not None:
        for module in plan.expert_parallel:
            if module.how:
                divide_experts(model.get_submodule(module.fqn), experts)
    if blocks.activations not in ("auto", "keep"):
        checkpoint_activations(model, blocks.activations, config=plan)
    if blocks.compile is True:
        compile_blocks(model, config=plan)
    if plan.tensor_parallel:
        apply_tensor_parallel(model, plan.tensor_parallel, mesh)
        _tie(model, plan)
    if plan.context_parallel:
        apply_context_parallel(model, plan.context_parallel, mesh)
    modules = dict(model.named_modules(remove_duplicate=False))
    aside = {model.get_parameter(planned.fqn) for planned in (*plan.replicated, *plan.ignored)}
    for group in plan.groups:  # children first, root last
        _shard_group(group, modules, model, fsdp_mesh(mesh, group.shard_axes), aside)
    for parameter_group in compat.param_groups(model):
        ParameterHooks(parameter_group)
    roots = [group.modules[0] for group in plan.groups if group.kind == "root"]
    for root in roots:
        _wire(_below(root, plan), modules, mesh)
    remember(model, ShardedState(plan=plan, mesh=mesh))
    repoint(optimizers, remembered, model)
    for name, new in model.named_parameters():
        if (old := replaced.get(canonical_name(name), new)) is not new:
            copy_hooks(old, new)
    watch_optimizers(model, dict.fromkeys(replaced.values()))
    for name, new in model.named_parameters(remove_duplicate=False):
        if (old := replaced.get(canonical_name(name), new)) is not new:
            owner, _, last = name.rpartition(".")
            follow(old, model.get_submodule(owner), last)
    watch_writes(model)
    register_dtensor_handlers()
    step_in_backward(model)
    watch_zero_grad()
    watch_by_default(model)
    replace_root_forward(model)
    hook_tensor_parallel(model, [modules[root] for root in roots])
    return model


def _prepare_storage(model: nn.Module, plan: Plan) -> None:
    """Prepare the storage of parameters: one object per tie, contiguous, upcast if planned."""
    _tie(model, plan)
    for planned in plan.parameters:
        parameter = model.get_parameter(planned.fqn)
        if planned.make_contiguous:
            parameter.data = parameter.data.contiguous()
        if planned.upcast_from:
            parameter.data = parameter.data.to(getattr(torch, planned.dtype))


def _tie(model: nn.Module, plan: Plan) -> None:
    """Register one object under all names of each tied parameter."""
    for planned in plan.parameters:
        for alias in planned.aliases:
            owner, _, name = alias.rpartition(".")
            model.get_submodule(owner)._parameters[name] = model.get_parameter(planned.fqn)


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
            reduce_dtype=_dtype(group.reduce_dtype or group.param_dtype),  # torch 2.15 would use the storage dtype
            cast_forward_inputs=False,  # `Casts` casts them
        ),
        offload_policy=policy,
        ignored_params=aside,
    )
    for member in members:
        # On the instance: torch uses the same class for modules sharded by others. FSDP2 raises an AssertionError.
        member.__dict__["__deepcopy__"] = partial(_refuse_copy, "copy.deepcopy", class_name(member))
        member.__dict__["__reduce_ex__"] = partial(_refuse_copy, "torch.save or pickle", class_name(member))
    if len({getattr(torch, p.dtype).is_complex for p in group.parameters if p.trainable}) > 1:
        compat.set_complex_apart(members[0])


def _refuse_copy(what: str, name: str, _: Any) -> None:
    raise ShardError(
        f"{what} of a sharded {name}",
        where=name,
        why="hooks and process groups cannot be copied",
        fix="copy the model before sharding and shard both, or build another and load_state_dict(model.state_dict()); "
        "for an average of weights, shardwise.EMA(model); to save it, shardwise.save_weights(model, folder)",
    )


def _placement_function(group: Group, model: nn.Module) -> Callable[[nn.Parameter], Shard | None] | None:
    dims = {id(model.get_parameter(p.fqn)): p.shard_dim for p in group.parameters if p.shard_dim}
    if not dims:
        return None
    return lambda parameter: Shard(dims[id(parameter)]) if id(parameter) in dims else None


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _below(root: str, plan: Plan) -> Plan:
    """Return the plan of one network in a container; the whole plan if the model is the root."""
    return replace(
        plan,
        groups=tuple(group for group in plan.groups if is_within(group.modules[0], root)),
        replicated=tuple(parameter for parameter in plan.replicated if is_within(parameter.fqn, root)),
        ignored=tuple(parameter for parameter in plan.ignored if is_within(parameter.fqn, root)),
        outer_modules=tuple(name for name in plan.outer_modules if is_within(name, root)),
    )


def _wire(plan: Plan, modules: dict[str, nn.Module], mesh: DeviceMesh) -> None:
    """Install shardwise's hooks: forward hooks, groups kept unsharded, gradients outside groups, prefetching."""
    model = modules[plan.root.modules[0]]
    compat.cast_instead_of_copies(model)
    compat.patch_accumulation(model)
    over = gradient_mesh(mesh)
    replicated = _place_outside(model, plan, modules, over)
    _install_forward_hooks(model, plan, modules, replicated)
    unused = UnusedParameters([g for group in plan.groups if group.reduce_unused for g in _fsdp_groups(group, modules)])
    on_recover(model, unused.forget)
    places = [_places(planned, modules)[0] for planned in (*plan.replicated, *plan.ignored)]
    BackwardEnd(model, over, places, unused)
    set_prefetch(plan, modules)
    if plan.float8:
        GatheredScales(model)


def _place_outside(model: nn.Module, plan: Plan, modules: dict[str, nn.Module], mesh: DeviceMesh) -> Replicated:
    """Move parameters outside groups to the device, replicated ones as DTensors."""
    device = compat.compute_device(model)
    replicated = Replicated()
    for planned in plan.replicated:
        replicated.add(_places(planned, modules), mesh, device)
    for planned in plan.ignored:
        (module, name), *_ = _places(planned, modules)
        parameter = module.get_parameter(name)
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    return replicated


def _install_forward_hooks(model: nn.Module, plan: Plan, modules: dict[str, nn.Module], replicated: Replicated) -> None:
    """Install forward hooks on each group's forward and on the planned entry points."""
    kept = [g for group in plan.groups if group.held for g in _fsdp_groups(group, modules)]
    parts = [
        PartsForwardHooks([modules[name] for name in group.modules], model, _casts(group))
        for group in plan.groups
        if len(group.modules) > 1
    ]
    for entry in parts:
        on_recover(model, entry.forget)
    branches = any(group.held and group.reduce_unused for group in plan.groups)
    single = [group for group in plan.groups if group is not plan.root and len(group.modules) == 1]
    hooks = {group.name: ForwardHooks(modules[group.modules[0]], model, _casts(group)) for group in single}
    root = RootForwardHooks(model, _casts(plan.root), kept, parts, replicated, branches=branches)
    for group in plan.groups:
        for name in group.entry_points:
            owner, _, method = name.rpartition(":")
            hooks.get(group.name, root).add_method(modules[owner], method)
    for name in plan.outer_modules:
        root.add_module(modules[name])
    watch_backward()


def _casts(group: Group) -> Casts:
    return Casts(_dtype(group.param_dtype) if group.cast_inputs else None, _dtype(group.output_dtype))


def _places(planned: PlannedParameter, modules: dict[str, nn.Module]) -> list[tuple[nn.Module, str]]:
    """Return the modules and attributes that a parameter is registered under."""
    split = [name.rpartition(".") for name in (planned.fqn, *planned.aliases)]
    return [(modules[owner], name) for owner, _, name in split]


def _fsdp_groups(group: Group, modules: dict[str, nn.Module]) -> list[Any]:
    return compat.groups_of(modules[group.modules[0]])
