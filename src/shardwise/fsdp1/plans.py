"""What FSDP1's constructor calls amount to, as a `Plan`: to print, to check and to save with checkpoints."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.fsdp1.names import clean_name
from shardwise.fsdp1.units import Unit
from shardwise.planning.dtypes import dtype_name
from shardwise.planning.plan import Group, Plan, PlannedParameter
from shardwise.sharding.full_params import reshard


def plan_of(root: Any) -> Plan:
    """The plan that the units of `root` carry out, under the names of the model that was wrapped.

    Ranks:
        Local.
    """
    reshard(root)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in nn.Module.named_parameters(root, remove_duplicate=False):
        names.setdefault(parameter, []).append(clean_name(name))
    paths = {module: clean_name(f"{path}.").rstrip(".") for path, module in root.named_modules()}
    groups = [_group(unit, paths[unit], names, is_root=unit is root) for unit in _inner_first(root)]
    ignored = [parameter for parameter in names if not isinstance(parameter, DTensor)]
    return Plan(
        model=type(root.module).__name__,
        device=root.compute_device.type,
        axes=tuple(zip(root.mesh.mesh_dim_names or ("shard",), root.mesh.shape, strict=True)),
        groups=tuple(group for group in groups if group is not None),
        ignored=tuple(_parameter(parameter, names[parameter], "ignore", "ignored by FSDP1") for parameter in ignored),
        reasons=(f"FSDP1's {root.sharding_strategy.name}, carried out by FSDP2",),
    )


def _inner_first(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterator[Unit]:
    """The units at and below a module, each after those inside it."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    for child in module.children():
        yield from _inner_first(child, seen)
    if isinstance(module, Unit):
        yield module


def _group(unit: Any, path: str, names: dict[nn.Parameter, list[str]], *, is_root: bool = False) -> Group | None:
    sharded = compat.state_param_groups(compat.fsdp_state(unit))
    parameters = tuple(
        _parameter(parameter, names[parameter]) for group in sharded for parameter in compat.sharded_parameters(group)
    )
    if not parameters and not is_root:
        return None
    precision = unit.mixed_precision
    keeps = is_root or unit.sharding_strategy not in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
    reduce_dtype = precision.reduce_dtype or precision.param_dtype
    return Group(
        modules=(path,),
        kind="root" if is_root else "block",
        parameters=parameters,
        param_dtype=None if precision.param_dtype is None else dtype_name(precision.param_dtype),
        reduce_dtype=None if reduce_dtype is None else dtype_name(reduce_dtype),
        cast_inputs=precision.cast_root_forward_inputs if is_root else precision.cast_forward_inputs,
        reshard_after_forward=not keeps,
        offload=unit.cpu_offload.offload_params,
        reason="what no other unit holds" if is_root else f"{type(unit.module).__name__}, wrapped as a unit",
    )


def _parameter(
    parameter: nn.Parameter, names: list[str], placement: str = "shard", reason: str = ""
) -> PlannedParameter:
    return PlannedParameter(
        fqn=names[0],
        aliases=tuple(names[1:]),
        shape=tuple(parameter.shape),
        dtype=dtype_name(parameter.dtype),
        trainable=parameter.requires_grad,
        placement=placement,  # pyrefly: ignore[bad-argument-type]
        reason=reason,
    )
