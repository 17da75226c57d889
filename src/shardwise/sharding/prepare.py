"""prepare_fully_shard(): Composer's one call, on any config its users have. Decides nothing itself."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shardwise import compat
from shardwise.config.load import load
from shardwise.config.schema import MeshConfig, PrecisionConfig, ShardConfig
from shardwise.errors import ConfigError, ShardError
from shardwise.planning.dtypes import choose_compute, dtype_name
from shardwise.planning.plan import Plan
from shardwise.planning.planner import device_capability
from shardwise.planning.planner import plan as make_plan
from shardwise.sharding.agreement import plan_together
from shardwise.sharding.apply import shard
from shardwise.sharding.fsdp1_keys import HYBRID, translate
from shardwise.sharding.fsdp1_precision import resolve_named
from shardwise.sharding.materialize import materialize
from shardwise.sharding.mesh import data_parallel_mesh, default_mesh, init_distributed
from shardwise.sharding.translation import Translation
from shardwise.sharding.wrap_functions import (
    chosen_modules,
    direct_children,
    drop_ignored,
    join_ties,
    overrides_of,
)

M = TypeVar("M", bound=nn.Module)


def prepare_fully_shard(
    model: M,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    config: ShardConfig | Mapping[str, Any] | None = None,
) -> M:
    """Shard `model` in place, point its optimizers at the shards, and return it.

    Groups come from the config where it names them, else from the model's `fsdp_wrap_fn` and `_fsdp_wrap`,
    else from its structure. What became of each setting stands in the plan, `sharded_state(model).plan`.

    Args:
        model: On meta, or initialised alike on every rank (with `sync_module_states` on rank 0 only).
        optimizer: One, several or none; built on the model before this call.
        config: A `ShardConfig`, or a dictionary of its fields, of FSDP1's arguments (`sharding_strategy`,
            `mixed_precision`, `cpu_offload`, ...) and of Composer's.

    Raises:
        ConfigError: With every setting that cannot be carried out, each with what to do instead.
        PlanError: The model cannot be sharded as asked; nothing has been changed.
        ShardError: Ranks hold different plans or weights, or an optimizer belongs to another model.

    Ranks:
        Collective. Call on every rank.
    """
    translation = _read(config, model)
    mesh = _find_mesh(translation)
    shard_config = _complete(translation, model, mesh)
    translation.raise_problems()

    def explained_plan() -> Plan:
        plan = make_plan(model, shard_config, mesh=mesh)
        reasons, warnings = tuple(translation.notes), tuple(translation.warnings)
        return replace(plan, reasons=plan.reasons + reasons, warnings=plan.warnings + warnings)

    plan = plan_together(explained_plan, mesh)
    if translation.sync_from_rank_zero:
        _sync_from_rank_zero(model)
    if translation.buffer_dtype is not None:
        _cast_buffers(model, getattr(torch, translation.buffer_dtype))
    optimizers = () if optimizer is None else (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
    return shard(model, mesh=mesh, optimizers=optimizers, plan=plan)


def _read(config: ShardConfig | Mapping[str, Any] | None, model: nn.Module) -> Translation:
    if config is None:
        return Translation()
    if isinstance(config, ShardConfig):
        return Translation(settings={field.name: getattr(config, field.name) for field in fields(ShardConfig)})
    if isinstance(config, Mapping):
        return translate(config, model)
    raise ConfigError(
        f"the config is a {type(config).__name__}",
        where="prepare_fully_shard: config",
        why="it is a ShardConfig or a dictionary of settings",
        fix="pass a ShardConfig, or the settings that differ from the defaults as a dictionary",
    )


def _find_mesh(translation: Translation) -> DeviceMesh:
    """The mesh that was given, or one of the given degrees, or the run's."""
    if translation.mesh is not None:
        mesh = _named(translation.mesh)
    elif translation.replicate is not None or translation.shard is not None:
        mesh = init_distributed(MeshConfig(replicate=translation.replicate or 1, shard=translation.shard))
    else:
        mesh = default_mesh()
    mesh = data_parallel_mesh(mesh)
    if translation.strategy in HYBRID and mesh.ndim == 1 and translation.replicate != 1:
        fix = f"set data_parallel_replicate_degree, the number of copies, to a divisor of {mesh.size()}"
        translation.problem("sharding_strategy", f"{translation.strategy} needs a mesh with a replicate axis", fix)
    if translation.strategy in ("FULL_SHARD", "SHARD_GRAD_OP") and mesh.ndim == 2 and translation.replicate is None:
        what = f"{translation.strategy} shards over all ranks, but the mesh has {mesh.shape[0]} copies"
        translation.problem("sharding_strategy", what, "use HYBRID_SHARD, or a mesh of one axis")
    return mesh


def _named(mesh: DeviceMesh) -> DeviceMesh:
    """FSDP1's meshes have no axis names: (shard), or (replicate, shard)."""
    if mesh.mesh_dim_names is not None or mesh.ndim != 2:
        return mesh
    return DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=("replicate", "shard"))


def _complete(translation: Translation, model: nn.Module, mesh: DeviceMesh) -> ShardConfig:
    """The `ShardConfig` that the settings, the model's own wishes and the device amount to."""
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
    """Modules to be groups, with settings of their own; None leaves it to the config."""
    if translation.only_children:
        if _names_groups(config):
            translation.problem("auto_wrap", "False contradicts the groups that the config names", "give one of them")
        return {name: {} for name in direct_children(model)}
    chosen = chosen_modules(model, translation)
    if chosen is not None and _names_groups(config):
        translation.note("fsdp_wrap_fn", "not asked: the config names the groups")
        return None
    if chosen is not None:
        translation.note("fsdp_wrap_fn", f"{len(chosen)} modules are groups because the model asks for it")
    return chosen


def _names_groups(config: ShardConfig) -> bool:
    named = config.block_classes or config.block_patterns or config.min_group_params or config.wrap_if
    return bool(named) or config.group_by != "auto"


def _base(config: ShardConfig, compute: str | None) -> dict[str, Any]:
    """What a group without settings of its own has, by field of `GroupOverride`."""
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
    """Give every rank rank 0's parameters and buffers; ranks that hold none yet (meta) get storage first."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    missing = [name for name, tensor in tensors.items() if tensor.is_meta]
    of_ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, missing)
    if of_ranks[0] and any(names != of_ranks[0] for names in of_ranks):
        raise ShardError(
            f"rank 0 has no values for {len(of_ranks[0])} tensors, first {of_ranks[0][0]!r}",
            where="sync_module_states",
            why="rank 0's values are sent to all ranks",
            fix="initialise it on rank 0, or leave it on meta on all ranks and materialize(model) later",
        )
    if of_ranks[0]:
        return  # on meta everywhere: there is nothing to send yet
    for name in missing:
        tensor = tensors[name]
        compat.replace_in_place(tensor, torch.empty_like(tensor, device="cpu"))
    materialize(model, sync_from_rank_zero=True)


def _cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """As FSDP1 did, once; ties between buffers are kept."""
    cast: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = cast.setdefault(id(buffer), buffer.to(dtype))
