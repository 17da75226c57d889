"""What every part of this package knows about a unit: one `FullyShardedDataParallel`, and the units of a model."""

from collections.abc import Iterator

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

from shardwise.errors import ConfigError


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
