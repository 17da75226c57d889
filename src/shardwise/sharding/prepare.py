"""prepare_fully_shard(): the equivalent of Composer's function, for any of its configs."""

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from os import PathLike
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shardwise import compat
from shardwise.config.fsdp1_names import HYBRID
from shardwise.config.load import load, read_yaml
from shardwise.config.schema import ROOT_PATTERN, GroupOverride, MeshConfig, PrecisionConfig, ShardConfig
from shardwise.distributed.agreement import gather_objects, run_on_all
from shardwise.distributed.mesh import axis_sizes, default_mesh, make_mesh, ranks_per_machine
from shardwise.errors import ConfigError, ShardError, fix_name
from shardwise.models.nested_tensors import cast_buffers
from shardwise.planning.assignment import find_tensors
from shardwise.planning.calls import callable_children, enclosing, has_parameters
from shardwise.planning.groups import is_explicit, name_matcher
from shardwise.planning.plan import Plan
from shardwise.planning.planner import device_capability
from shardwise.planning.planner import plan as make_plan
from shardwise.planning.settings import choose_compute, dtype_name
from shardwise.sharding.apply import shard
from shardwise.sharding.blocks import Mode, change_activations, find_blocks
from shardwise.sharding.fsdp1_keys import NAMED, Translation, fields_of, read_fields, resolve_named, translate
from shardwise.sharding.materialize import materialize

_PLAIN = ("reshard_after_forward", "offload", "forward_prefetch", "backward_prefetch")
_KEYS = (*_PLAIN, "cpu_offload", "mixed_precision", "mp_policy")
_AXES = ("replicate", "shard")


def chosen_modules(model: nn.Module, translation: Translation) -> dict[str, dict[str, Any]] | None:
    """Return the modules that the model selects as groups, with their settings, in the model's order.

    `_fsdp_wrap` of a module takes precedence over `fsdp_wrap_fn` of the nearest module above it.

    Returns:
        Fields of `GroupOverride` by name, `(root)` for the root; None if the model selects no groups.
    """
    chosen: dict[str, dict[str, Any]] = {}
    answers, has_opinion = _answers(model, "_fsdp_wrap", "fsdp_wrap_fn")
    for name, answer in answers.items():
        settings = _read_wrap_value(translation, name or ROOT_PATTERN, answer) if isinstance(answer, dict) else None
        if not name:
            if settings:
                chosen[ROOT_PATTERN] = settings
        elif (answer or settings is not None) and has_parameters(model.get_submodule(name)):
            chosen[name] = settings or {}
    if getattr(model, "_fsdp_wrap", None) is False:
        translation.note("_fsdp_wrap", "False on the root: it is still a group, of the remaining parameters")
    return chosen if has_opinion else None


def recomputed_modules(model: nn.Module, plan: Plan, translation: Translation) -> dict[str, nn.Module]:
    """Return the modules with recomputed or offloaded activations, by name.

    These are the outermost modules that the model selects by `_activation_checkpointing` and
    `activation_checkpointing_fn`, or the blocks of the plan if it has neither.

    Raises:
        ShardError: The model selects none, and the plan has no blocks.
    """
    asked = {
        "activation_checkpointing": translation.recompute,
        "activation_cpu_offload": translation.offload_activations,
    }
    if not any(asked.values()):
        return {}
    answers, has_opinion = _answers(model, "_activation_checkpointing", "activation_checkpointing_fn")
    if has_opinion:
        chosen = {name: {} for name, answer in answers.items() if name and answer}
        modules = {name: model.get_submodule(name) for name in chosen if not _nearest(name, chosen)}
    else:
        blocks = find_blocks(model, plan, action="checkpoint_activations")
        modules = {name: block for name, block in blocks.items() if getattr(block, "_activation_checkpointing", True)}
    first = f", first {next(iter(modules))}" if modules else ": activation_checkpointing_fn chooses none"
    for key in [key for key, is_asked in asked.items() if is_asked]:
        translation.note(key, f"of {len(modules)} modules{first}")
    return modules


def _answers(model: nn.Module, mark_name: str, function_name: str) -> tuple[dict[str, Any], bool]:
    """Return the model's setting of each module by name, and whether the model has such settings."""
    asked: dict[str, Callable[[nn.Module], Any]] = {}
    answers: dict[str, Any] = {}
    has_opinion = False
    for name, module in model.named_modules():
        function = asked.get(_nearest(name, asked)) if asked else None
        if callable(own := getattr(module, function_name, None)):
            asked[name] = own
            has_opinion = True
            function = function or (own if not name else None)
        mark = getattr(module, mark_name, None)
        has_opinion = has_opinion or bool(mark)
        answers[name] = mark if mark is not None else function(module) if function is not None else False
    return answers, has_opinion


def drop_ignored(chosen: dict[str, dict[str, Any]], patterns: tuple[str, ...]) -> None:
    """Remove ignored modules and modules inside them, which have no parameters to group."""
    ignored = [name_matcher(pattern) for pattern in patterns]
    for name in list(chosen):
        if any(fits(outer) for outer in (name, *enclosing(name)) for fits in ignored):
            del chosen[name]


def _nearest(name: str, asked: dict[str, Any]) -> str:
    """Return the longest proper prefix of `name` among the names in `asked`."""
    return next((outer for outer in enclosing(name) if outer in asked), "")


def _read_wrap_value(translation: Translation, name: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a module as fields of `GroupOverride`."""
    fields: dict[str, Any] = {}
    for key, value in answer.items():
        where = f"fsdp_wrap_fn({name}).{key}"
        given = fields_of(value)
        name_of_precision = value.upper() if isinstance(value, str) else ""
        if key in _PLAIN:
            fields[key] = value
        elif key == "cpu_offload":
            fields["offload"] = bool((given or {"offload_params": value}).get("offload_params"))
        elif key not in _KEYS:
            hint = fix_name(key, _KEYS, f"choose among {', '.join(_KEYS)}")
            translation.problem(where, "is not a setting of a single group", hint)
        elif name_of_precision == "FULL":
            fields["param_dtype"] = "storage"
        elif given is not None:
            fields |= read_fields(translation, where, given)
        else:
            what = f"{value!r} does not name a dtype" if name_of_precision in NAMED else f"is {value!r}"
            translation.problem(where, what, 'give {"param_dtype": "bf16", "reduce_dtype": "fp32"} or "FULL"')
    return fields


def join_ties(model: nn.Module, chosen: dict[str, dict[str, Any]], translation: Translation) -> None:
    """Remove modules of `chosen` that share a tied tensor, so that it belongs to the group around them."""
    tied = [tensor.names for tensor in find_tensors(model) if len(tensor.names) > 1]
    for names in tied:
        while len(homes := {_nearest(name, chosen) for name in names} - {""}) > 1:
            for home in homes:
                del chosen[home]
            around = " and ".join(sorted(homes))
            translation.note("ties", f"{around} share {' = '.join(names)}; the group around them holds both")


def overrides_of(chosen: dict[str, dict[str, Any]], base: dict[str, Any]) -> tuple[GroupOverride, ...]:
    """Return overrides with the settings of each module, and the config's settings for modules inside it.

    Args:
        chosen: From `chosen_modules`, outer modules first.
        base: Settings of the config, as fields of `GroupOverride`.
    """
    overrides: list[GroupOverride] = []
    touched: dict[str, set[str]] = {}
    for name, own in chosen.items():
        above = touched.get(_nearest(name, touched), set())
        complete = {field: base[field] for field in sorted(above) if base.get(field) is not None} | own
        if complete:
            touched[name] = above | complete.keys()
            overrides.append(GroupOverride(pattern=name, **complete))
    return tuple(overrides)


M = TypeVar("M", bound=nn.Module)


def prepare_fully_shard(
    model: M,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    config: Any = None,
) -> M:
    """Shard `model` in place, repoint its optimizers to the shards, and return the model.

    Groups come from the config if it names them, else from the model's `fsdp_wrap_fn` and `_fsdp_wrap`,
    else from its structure. The plan, `sharded_state(model).plan`, reports the effect of each setting.

    Args:
        model: On meta, or initialized identically on every rank (with `sync_module_states` on rank 0 only).
        optimizer: Optimizer, optimizers or None; created before this call.
        config: A `ShardConfig`; a dictionary of its fields, of FSDP1's arguments (`sharding_strategy`,
            `mixed_precision`, `cpu_offload`, ...) and of Composer's; Composer's `FSDPConfig`, `FSDP2Config` or
            `ParallelismConfig`; or a run file of Composer's, as a dictionary or the path of its YAML.

    Raises:
        ConfigError: Settings are not supported; lists all of them, each with an alternative.
        PlanError: The model cannot be sharded as asked; nothing has been changed.
        ShardError: Ranks have different plans or weights, or an optimizer belongs to another model.

    Ranks:
        Collective. Call on every rank.
    """
    translation = _read(config, model)
    mesh = default_mesh() if translation.problems else _find_mesh(translation)
    shard_config = _complete(translation, model, mesh)
    translation.raise_problems()
    plan = run_on_all(lambda: make_plan(model, shard_config, mesh=mesh), mesh)
    recomputed = recomputed_modules(model, plan, translation)
    # Notes about settings, in the same order on all ranks.
    reasons = (translation.precision_reason or plan.reasons[0], *plan.reasons[1:], *sorted(translation.notes))
    plan = replace(plan, reasons=reasons, warnings=(*plan.warnings, *sorted(translation.warnings)))
    for text in translation.warnings:
        warnings.warn(text, UserWarning, stacklevel=2)
    if translation.sync_from_rank_zero:
        _sync_from_rank_zero(model)
    if translation.buffer_dtype is not None:
        cast: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for module in model.modules():
            cast_buffers(module, getattr(torch, translation.buffer_dtype), cast)
    optimizers = () if optimizer is None else (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
    mode: Mode = "full" if translation.recompute else "none"
    change_activations(recomputed, [mode] * len(recomputed), offload=translation.offload_activations)
    return shard(model, shard_config, mesh=mesh, optimizers=optimizers, plan=plan)


def _read(config: Any, model: nn.Module) -> Translation:
    if config is None:
        return Translation()
    if isinstance(config, ShardConfig):
        return Translation(settings={field.name: getattr(config, field.name) for field in fields(ShardConfig)})
    settings = read_yaml(config) if isinstance(config, str | PathLike) else fields_of(config)
    if settings is not None:
        return translate(settings, model)
    raise ConfigError(
        f"the config is a {type(config).__name__}",
        where="prepare_fully_shard: config",
        why="it is a ShardConfig, a dictionary of settings, one of Composer's configs or the path of a YAML file",
        fix="pass a ShardConfig, or the settings that differ from the defaults as a dictionary",
    )


def _find_mesh(translation: Translation) -> DeviceMesh:
    """Return the given mesh, a mesh of the given degrees and strategy, or the run's mesh."""
    strategy, given = translation.strategy, translation.mesh
    if given is None:
        mesh = _mesh_of_degrees(translation, default_mesh())
    elif strategy == "NO_SHARD" and given.ndim == 1:
        mesh = DeviceMesh(given.device_type, given.mesh.unsqueeze(1), mesh_dim_names=_AXES)
    elif given.ndim == 2 and given.mesh_dim_names is None:  # FSDP1's meshes have no axis names
        mesh = DeviceMesh(given.device_type, given.mesh, mesh_dim_names=_AXES)
    else:
        mesh = given
    sizes = axis_sizes(mesh)
    replicate, shard = sizes.get("replicate", 1), sizes["shard"]
    for axis, degree in translation.degrees.items():
        if degree != (size := sizes.get(axis, 1)):
            name = f"data_parallel_{axis}_degree" if axis in _AXES else f"{axis}_parallel_degree"
            translation.problem(name, f"is {degree}, but the mesh has {size}", "omit it, or pass another mesh")
    what = fix = ""
    if (
        strategy in HYBRID
        and given is not None
        and "replicate" not in sizes
        and translation.degrees.get("replicate") != 1
    ):
        what = f"{strategy} needs a mesh with a replicate axis"
        fix = f"set data_parallel_replicate_degree, the number of copies, to a divisor of {mesh.size()}"
    if strategy in ("FULL_SHARD", "SHARD_GRAD_OP") and replicate > 1:
        what = f"{strategy} shards over all ranks, but the mesh has {replicate} copies"
        fix = "use HYBRID_SHARD, or a mesh of one axis"
    if strategy == "NO_SHARD" and shard > 1:
        what, fix = f"NO_SHARD, but the mesh shards over {shard} ranks", "use HYBRID_SHARD"
    if what:
        translation.problem("sharding_strategy", what, fix)
    return mesh


def _mesh_of_degrees(translation: Translation, run_mesh: DeviceMesh) -> DeviceMesh:
    """Return the run's mesh, unless the degrees or the strategy require another."""
    strategy, (replicate, shard) = translation.strategy, map(translation.degrees.get, _AXES)
    degrees = {axis: size for axis, size in translation.degrees.items() if size > 1 and axis not in _AXES}
    is_met = all(axis_sizes(run_mesh).get(axis, 1) == size for axis, size in degrees.items())
    num_ranks = dist.get_world_size() // math.prod(degrees.values())
    if strategy == "NO_SHARD":
        shard = 1
        translation.note("sharding_strategy", f"NO_SHARD: {num_ranks} replicas, each with all parameters")
    elif strategy in HYBRID and replicate is None and shard is None and run_mesh.ndim == 1:
        shard = ranks_per_machine()
        if shard is None or shard % math.prod(degrees.values()):
            what = f"{strategy} without degrees needs the same number of consecutive ranks on every machine"
            translation.problem("sharding_strategy", what, "set data_parallel_replicate_degree, the number of copies")
            return run_mesh
        shard //= math.prod(degrees.values())
        over = f"{num_ranks // shard} machines of {shard}" if shard < num_ranks else f"one machine of {shard}"
        translation.note("sharding_strategy", f"{strategy}: replicated over {over} ranks, which share one copy")
    if replicate is None and shard is None and is_met:
        return run_mesh
    if replicate is None and strategy in (*HYBRID, "NO_SHARD"):
        replicate = max(num_ranks // (shard or 1), 1)
    device: Any = run_mesh.device_type
    return make_mesh(MeshConfig(replicate=replicate or 1, shard=shard, device=device, **degrees))


def _complete(translation: Translation, model: nn.Module, mesh: DeviceMesh) -> ShardConfig:
    """Return the `ShardConfig` of the settings, the model's own settings and the device."""
    storage = sorted({dtype_name(p.dtype) for p in model.parameters() if p.is_floating_point()})
    compute = choose_compute(PrecisionConfig(), mesh.device_type, device_capability(), storage).dtype
    resolve_named(translation, compute)
    settings = dict(translation.settings)
    if translation.precision:
        if "precision" in settings:
            translation.problem("precision", "contradicts mixed_precision", "give one of them")
        settings["precision"] = PrecisionConfig(**translation.precision)
    config = ShardConfig() if translation.problems else load(ShardConfig, settings)
    chosen = _chosen(translation, model, config)
    if chosen is None:
        return config
    drop_ignored(chosen, config.ignored)
    join_ties(model, chosen, translation)
    overrides = overrides_of(chosen, _base(config, compute))
    return replace(config, wrap_if=lambda name, module: name in chosen, overrides=(*overrides, *config.overrides))


def _chosen(translation: Translation, model: nn.Module, config: ShardConfig) -> dict[str, dict[str, Any]] | None:
    """Return the modules to shard as groups, with their settings; None to use the config."""
    if translation.only_children:
        if is_explicit(config):
            translation.problem("auto_wrap", "False contradicts the groups that the config names", "give one of them")
        return {name: {} for name, child in callable_children(model) if has_parameters(child)}
    chosen = chosen_modules(model, translation)
    if chosen is not None and is_explicit(config):
        translation.note("fsdp_wrap_fn", "not asked: the config names the groups")
        return None
    if chosen is not None:
        num_groups = len(chosen.keys() - {ROOT_PATTERN})
        translation.note("fsdp_wrap_fn", f"{num_groups} modules are groups because the model asks for it")
    return chosen


def _base(config: ShardConfig, compute: str | None) -> dict[str, Any]:
    """Return the settings of a group without its own settings, as fields of `GroupOverride`."""
    param, reduce = config.precision.param_dtype, config.precision.reduce_dtype
    return {
        "param_dtype": (compute or "storage") if param == "auto" else param,
        "reduce_dtype": "float32" if reduce == "auto" else reduce,
        "cast_inputs": config.precision.cast_inputs,
        "reshard_after_forward": True if config.reshard_after_forward is None else config.reshard_after_forward,
        "offload": config.offload,
        "forward_prefetch": config.prefetch.forward,
        "backward_prefetch": config.prefetch.backward,
    }


def _sync_from_rank_zero(model: nn.Module) -> None:
    """Broadcast rank 0's parameters and buffers; allocate those on meta first.

    Ranks:
        Collective.
    """
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    missing = [name for name, tensor in tensors.items() if tensor.is_meta]
    of_ranks = gather_objects(missing)
    if of_ranks[0] and any(names != of_ranks[0] for names in of_ranks):
        raise ShardError(
            f"rank 0 has no values for {len(of_ranks[0])} tensors, first {of_ranks[0][0]!r}",
            where="sync_module_states",
            why="rank 0's values are broadcast to all ranks",
            fix="initialize it on rank 0, or leave it on meta on all ranks and materialize(model) later",
        )
    if of_ranks[0]:
        return  # on meta on all ranks: no values to broadcast
    for name in missing:
        tensor = tensors[name]
        compat.replace_in_place(tensor, torch.empty_like(tensor, device="cpu"))
    materialize(model, sync_from_rank_zero=True)
