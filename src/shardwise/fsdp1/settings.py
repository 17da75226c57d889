"""What one FSDP1 constructor call asks for, read once: strategy, dtypes, device, ignored parts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from shardwise.errors import ConfigError
from shardwise.fsdp1.warned import warn_once

_KEEPS_GATHERED = (
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy._HYBRID_SHARD_ZERO2,
    ShardingStrategy.NO_SHARD,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """A constructor call's arguments, with FSDP1's defaults filled in."""

    strategy: ShardingStrategy
    precision: MixedPrecision
    offload: bool

    @property
    def reshard_after_forward(self) -> bool | None:
        """None frees all units but the root after forward, as FSDP1's FULL_SHARD does."""
        return False if self.strategy in _KEEPS_GATHERED else None

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """FSDP1 sums gradients in `param_dtype` when no `reduce_dtype` is given; inputs are cast by the unit."""
        reduce_dtype = self.precision.reduce_dtype or self.precision.param_dtype
        return MixedPrecisionPolicy(
            param_dtype=self.precision.param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
        )

    @property
    def offload_policy(self) -> OffloadPolicy:
        """Pinned where there is an accelerator to copy to."""
        return CPUOffloadPolicy(pin_memory=torch.accelerator.is_available()) if self.offload else OffloadPolicy()


def read_settings(
    sharding_strategy: ShardingStrategy | None,
    cpu_offload: CPUOffload | None,
    backward_prefetch: BackwardPrefetch | None,
    mixed_precision: MixedPrecision | None,
) -> Settings:
    """The settings of a call; what FSDP2 does otherwise is said once.

    Ranks:
        Local.
    """
    if backward_prefetch is not BackwardPrefetch.BACKWARD_PRE:
        asked = "None" if backward_prefetch is None else backward_prefetch.name
        warn_once(
            f"backward_prefetch={asked}",
            "FSDP2 always gathers the next unit ahead of the gradients; results are the same, one more unit is held",
        )
    precision = mixed_precision or MixedPrecision()
    if precision.keep_low_precision_grads:
        warn_once(
            "keep_low_precision_grads=True",
            "gradients have the dtype in which parameters are stored; store those in 16 bits to keep gradients there",
        )
    strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
    if not isinstance(strategy, ShardingStrategy):
        raise ConfigError(
            f"sharding_strategy is {strategy!r}",
            where="FullyShardedDataParallel(sharding_strategy=)",
            why="it is a member of ShardingStrategy",
            fix=f"choose among {', '.join(ShardingStrategy.__members__)}",
        )
    return Settings(
        strategy=strategy, precision=precision, offload=cpu_offload is not None and cpu_offload.offload_params
    )


def find_device(
    device_id: int | torch.device | None, device_mesh: DeviceMesh | None, module: nn.Module
) -> torch.device:
    """Where a unit computes: as asked, else where its mesh or its parameters are, else the accelerator.

    FSDP1 refuses a machine without an accelerator unless `device_id` is the CPU; here the CPU is used.

    Ranks:
        Local. Makes the device of `device_id` the current one: FSDP2 knows no other.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if isinstance(device_id, int):
        device = torch.device(accelerator.type if accelerator is not None else "cpu", device_id)
    elif device_id is not None:
        device = torch.device(device_id)
    elif device_mesh is not None:
        device = torch.device(device_mesh.device_type)
    else:
        placed = (tensor.device for tensor in module.parameters() if tensor.device.type not in ("cpu", "meta"))
        device = next(placed, accelerator or torch.device("cpu"))
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is not None and device.index != torch.accelerator.current_device_index():
        torch.accelerator.set_device_index(device.index)
    return torch.device(device.type, torch.accelerator.current_device_index())


@dataclass(slots=True)
class Ignored:
    """What a unit leaves alone, what its nested units left alone included."""

    modules: set[nn.Module]
    parameters: set[nn.Parameter]


def find_ignored(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
    nested: Iterable[Any],
) -> Ignored:
    """Every module and parameter to be ignored, given as modules with all they hold, or as parameters.

    Args:
        module: About to be wrapped.
        ignored_modules: FSDP1's argument.
        ignored_states: FSDP1's argument that takes parameters or modules.
        nested: Units already made inside `module`.

    Raises:
        ConfigError: Both arguments are given, or one holds a unit.

    Ranks:
        Local.
    """
    where = "FullyShardedDataParallel(ignored_modules=, ignored_states=)"
    states = list(ignored_states or ())
    given = list(ignored_modules or ())
    if given and states:
        raise ConfigError(
            "both are given", where=where, why="ignored_states takes both kinds", fix="keep ignored_states"
        )
    units = {id(unit) for unit in nested}
    roots = given or [state for state in states if isinstance(state, nn.Module)]
    if any(id(root) in units for root in roots):
        raise ConfigError(
            "an ignored module is wrapped already", where=where, why="its parameters are sharded", fix="leave it out"
        )
    modules = {child for root in roots for child in root.modules() if id(child) not in units}
    parameters = {parameter for child in modules for parameter in child.parameters(recurse=False)}
    parameters |= {state for state in states if isinstance(state, nn.Parameter)}
    for unit in nested:
        modules |= unit._ignored_modules
        parameters |= unit._ignored_params
    return Ignored(modules, parameters)
