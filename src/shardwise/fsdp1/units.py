"""FSDP1's units on FSDP2's modules: names, flat parameters, buffers, optimizers built on them."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

from shardwise import compat
from shardwise.errors import ConfigError, ShardError
from shardwise.models import nested_tensors
from shardwise.sharding.inventory import canonical_name

WRAPPED = "_fsdp_wrapped_module"
PREFIX = f"{WRAPPED}."


def clean_name(name: str) -> str:
    """A parameter's or buffer's name in the model that was wrapped."""
    return canonical_name(name, (WRAPPED, "_checkpoint_wrapped_module"))


class Unit(nn.Module):
    """The attributes of a unit, under FSDP1's names where scripts read them."""

    mesh: DeviceMesh
    """What it is sharded over."""
    process_group: dist.ProcessGroup
    """Its shard axis, or with NO_SHARD the axis of copies."""
    rank: int
    """In `process_group`."""
    world_size: int
    compute_device: torch.device
    sharding_strategy: fsdp.ShardingStrategy
    mixed_precision: fsdp.MixedPrecision
    cpu_offload: fsdp.CPUOffload
    backward_prefetch: fsdp.BackwardPrefetch | None
    forward_prefetch: bool
    limit_all_gathers: bool
    is_summoned: bool
    """It holds whole parameters now (`summon_full_params`)."""
    has_comm_hook: bool
    is_full_precision: bool
    """Computes in the dtype of its shards now: `FSDP_USE_FULL_PREC_IN_EVAL`."""
    forward_hooks: Any
    _fsdp_wrapped_module: nn.Module
    _ignored_modules: set[nn.Module]
    _ignored_params: set[nn.Parameter]
    _state_dict_type: fsdp.StateDictType
    _state_dict_config: fsdp.StateDictConfig
    _optim_state_dict_config: fsdp.OptimStateDictConfig


def units_in(module: nn.Module) -> list[Unit]:
    """The units of a module, itself included, outer ones first."""
    return [unit for unit in module.modules() if isinstance(unit, Unit)]


def outer_units(module: nn.Module) -> Iterator[Unit]:
    """The units of a module that are inside no other of its units."""
    inside: set[nn.Module] = set()
    for unit in units_in(module):
        if unit not in inside:
            yield unit
            inside.update(unit.modules())


def first_unit(module: nn.Module, where: str) -> Unit:
    """The outermost unit of a module; a call on a module without one is refused."""
    units = units_in(module)
    if not units:
        raise WrongArgument(
            f"{type(module).__name__} holds no FullyShardedDataParallel",
            where=where,
            why="the call is about sharded parameters",
            fix="wrap the model first, or pass the wrapped one",
        )
    return units[0]


INTERNALS = {
    "_handle": "the handle of a flat parameter",
    "_handles": "the handles of flat parameters",
    "_all_handles": "the handles of flat parameters",
    "_flat_param": "the flat parameter",
    "flat_param": "the flat parameter",
    "_exec_order_data": "the order in which flat parameters were used",
}


class WrongArgument(ConfigError, AssertionError, ValueError, NotImplementedError):
    """An argument that FSDP1 refuses too; also of the types that FSDP1 raises, so that a script still catches it."""


class WrongUse(ShardError, AssertionError, ValueError, RuntimeError):
    """A call that FSDP1 refuses too; also of the types that FSDP1 raises, so that a script still catches it."""


def refuse_while_running(units: Iterable[Any], where: str) -> None:
    """Raise if a forward or backward of one of the units is running: it needs the parameters as they are."""
    for unit in units:
        is_in_forward = unit.forward_hooks.depth > 0
        if is_in_forward or compat.is_running_backward(unit):
            raise WrongUse(
                f"{where} is called during {'forward' if is_in_forward else 'backward'}",
                where=f"{type(unit.module).__name__}, wrapped as a unit",
                why="parameters are unsharded and freed by the pass that is running",
                fix="call it before or after the step",
            )


class NoFlatParameter(ShardError, AttributeError):
    """Raised for FSDP1's internals; an AttributeError too, so that `hasattr` and `getattr` with a default work."""


def refuse_internal(name: str) -> NoFlatParameter:
    """The error for reading one of `INTERNALS`."""
    return NoFlatParameter(
        f"there is no {name}",
        where=f"FullyShardedDataParallel.{name}",
        why=f"it is {INTERNALS[name]} in FSDP1; FSDP2 shards every parameter by itself",
        fix="use parameters(), whose to_local() is this rank's shard, or summon_full_params",
    )


class FlatParameter(nn.Parameter):
    """So that `isinstance(parameter, FlatParameter)` can be asked: it never is one."""


_BEFORE = "_shardwise_buffer_dtypes"


def cast_buffers(units: list[Any]) -> None:
    """Cast the floating-point buffers of all units of a model to their `buffer_dtype`; or back to their own."""
    done: set[nn.Module] = set()
    cast: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for unit in reversed(units):
        dtype = unit.mixed_precision.buffer_dtype
        for owner in unit.modules():
            if owner in done:
                continue
            done.add(owner)
            if dtype is None or owner in unit._ignored_modules:
                continue
            before = owner.__dict__.setdefault(_BEFORE, {})
            if not unit.is_full_precision:
                before.update(nested_tensors.cast_buffers(owner, dtype, cast))
            for own in set(before.values()) if unit.is_full_precision else ():
                nested_tensors.cast_buffers(owner, own, cast, {name for name in before if before[name] == own})


def dtypes_before(module: nn.Module) -> dict[str, torch.dtype]:
    """Clean names of the buffers that were cast, with the dtype each had."""
    return {
        clean_name(f"{path}.{name}" if path else name): dtype
        for path, owner in module.named_modules()
        for name, dtype in owner.__dict__.get(_BEFORE, {}).items()
    }
