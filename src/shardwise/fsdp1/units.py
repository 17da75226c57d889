"""FSDP1's units on FSDP2's modules: names, flat parameters, buffers, optimizers built on them."""

import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    MixedPrecision,
    OptimStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictType,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.errors import ConfigError, ShardError
from shardwise.sharding.repointing import Remembered, follow_names, remember_parameters, repoint

WRAPPED = "_fsdp_wrapped_module"
PREFIX = f"{WRAPPED}."
_RECOMPUTED = "_checkpoint_wrapped_module."


def clean_name(name: str) -> str:
    """A parameter's or buffer's name in the model that was wrapped."""
    return name.replace(PREFIX, "").replace(_RECOMPUTED, "")


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
    sharding_strategy: ShardingStrategy
    mixed_precision: MixedPrecision
    cpu_offload: CPUOffload
    is_summoned: bool
    """Whole parameters stand in it now."""
    has_comm_hook: bool
    _fsdp_wrapped_module: nn.Module
    _ignored_modules: set[nn.Module]
    _ignored_params: set[nn.Parameter]
    _state_dict_type: StateDictType
    _state_dict_config: StateDictConfig
    _optim_state_dict_config: OptimStateDictConfig


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
    """The outermost unit of a module.

    Raises:
        ConfigError: There is none.
    """
    units = units_in(module)
    if not units:
        raise ConfigError(
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
    """Cast the floating-point buffers of each unit to its `buffer_dtype`, inner units first.

    Args:
        units: All units of a model, outer ones first; each says which modules it ignores.

    Ranks:
        Local.
    """
    done: set[nn.Module] = set()
    cast: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for unit in reversed(units):
        dtype = unit.mixed_precision.buffer_dtype
        for owner in unit.modules():
            if owner in done:
                continue
            done.add(owner)
            if dtype is not None and owner not in unit._ignored_modules:
                _cast_own(owner, dtype, cast)


def _cast_own(owner: nn.Module, dtype: torch.dtype, cast: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
    for name, buffer in owner._buffers.items():
        if buffer is None or not buffer.is_floating_point() or buffer.dtype == dtype:
            continue
        owner.__dict__.setdefault(_BEFORE, {})[name] = buffer.dtype
        if id(buffer) not in cast:  # a buffer under two names stays one; the old one is held so that ids stay apart
            cast[id(buffer)] = (buffer, buffer.to(dtype))
        owner._buffers[name] = cast[id(buffer)][1]


def dtypes_before(module: nn.Module) -> dict[str, torch.dtype]:
    """Clean names of the buffers that were cast, with the dtype each had."""
    return {
        clean_name(f"{path}.{name}" if path else name): dtype
        for path, owner in module.named_modules()
        for name, dtype in owner.__dict__.get(_BEFORE, {}).items()
    }


_SHARDED: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
"""Identity of a replaced parameter to the sharded one; an entry goes with either of the two."""
_REPLACED: dict[int, weakref.ref[torch.Tensor]] = {}
_is_watching = False

Places = list[tuple[nn.Module, str, nn.Parameter]]


def find_places(module: nn.Module) -> Places:
    """Where each parameter of a module is registered, before sharding replaces it."""
    return [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None
    ]


def remember_replaced(places: Places) -> None:
    """Let optimizers that hold parameters of before the sharding find the sharded ones at their next step.

    Args:
        places: From `find_places`, before the sharding.

    Ranks:
        Local.
    """
    global _is_watching
    if not _is_watching:
        register_optimizer_step_pre_hook(_before_step)
        _is_watching = True
    for owner, name, old in places:
        new = owner._parameters[name]
        if new is not None and new is not old:
            _SHARDED[id(old)] = new
            _REPLACED[id(old)] = weakref.ref(old, functools.partial(_forget, id(old)))


def _forget(key: int, _: object) -> None:
    _REPLACED.pop(key, None)
    _SHARDED.pop(key, None)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    adopt(optimizer)
    follow_names(optimizer)


def adopt(optimizer: Optimizer) -> None:
    """Point an optimizer that was built before the wrapping at the sharded parameters; others are left alone.

    Ranks:
        Local.
    """
    if not _REPLACED:
        return
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    pairs = {id(old): new for old in held if (new := _sharded(old)) is not None}
    if pairs:
        _repoint(optimizer, held, pairs)


def _sharded(old: torch.Tensor) -> nn.Parameter | None:
    reference = _REPLACED.get(id(old))
    return _SHARDED.get(id(old)) if reference is not None and reference() is old else None


def _repoint(optimizer: Optimizer, held: Iterable[torch.Tensor], pairs: dict[int, nn.Parameter]) -> None:
    """In place, so that schedulers keep working; state is split as its parameter is."""
    before, after = nn.Module(), nn.Module()
    for index, old in enumerate(held):
        before.register_parameter(str(index), old)  # pyrefly: ignore[bad-argument-type]
        after.register_parameter(str(index), pairs.get(id(old), old))  # pyrefly: ignore[bad-argument-type]
    remembered: Remembered = remember_parameters(before, [optimizer])
    repoint([optimizer], remembered, after)
