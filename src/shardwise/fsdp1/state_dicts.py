"""FSDP1's three kinds of model state dict, on sharded parameters: full, sharded, local."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.errors import ConfigError, ShardError
from shardwise.fsdp1.buffers import dtypes_before
from shardwise.fsdp1.names import PREFIX, clean_name
from shardwise.fsdp1.warned import warn_once
from shardwise.sharding.gathering import gather_in_buckets
from shardwise.sharding.layout import local_tensor
from shardwise.sharding.repointing import shard_like

_BUCKET_BYTES = 256 * 1024**2
CONFIGS = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


def complete_configs(kind: StateDictType, config: Any, optim_config: Any) -> tuple[Any, Any]:
    """FSDP1's default configs where none is given.

    Raises:
        ConfigError: A config belongs to another kind of state dict.
    """
    given = []
    for config_class, value in zip(CONFIGS[kind], (config, optim_config), strict=True):
        value = config_class() if value is None else value
        if type(value) is not config_class:
            raise ConfigError(
                f"{kind.name} is given a {type(value).__name__}",
                where="state_dict_type",
                why="each kind of state dict has a config of its own",
                fix=f"pass {config_class.__name__}(...)",
            )
        given.append(value)
    return given[0], given[1]


def finish_state_dict(
    unit: Any, destination: dict[str, Any], prefix: str, names: set[str], kind: StateDictType, config: Any
) -> None:
    """Turn what `nn.Module.state_dict` collected below a unit into what FSDP1 returns.

    Args:
        unit: The outermost unit of its tree.
        destination: Also holds what was collected elsewhere, which is left alone.
        prefix: Of the unit's entries.
        names: Entries that the unit's tree has added.
        kind: FULL, SHARDED or LOCAL.
        config: That of the kind.

    Ranks:
        Collective for FULL_STATE_DICT, else local.
    """
    entries = {name: destination.pop(name) for name in list(destination) if name in names}
    clean = {prefix + name[len(prefix) :].replace(PREFIX, ""): value for name, value in entries.items()}
    dtypes = dtypes_before(unit)
    for name, value in _converted(unit, clean, kind, config):
        if name[len(prefix) :] in dtypes and isinstance(value, torch.Tensor):
            value = value.to(dtypes[name[len(prefix) :]])
        destination[name] = value


def _converted(unit: Any, entries: dict[str, Any], kind: StateDictType, config: Any) -> Iterator[tuple[str, Any]]:
    if kind is StateDictType.FULL_STATE_DICT:
        return _full(unit, entries, config)
    if kind is StateDictType.LOCAL_STATE_DICT:
        # DTensors, as FSDP1 returned ShardedTensors: of plain tensors torch.distributed.checkpoint keeps one rank's.
        warn_once(
            "LOCAL_STATE_DICT",
            "holds each parameter sharded, as SHARDED_STATE_DICT does; there are no flat parameters, and FSDP1's local "
            "files do not load",
        )
    return ((name, copy_sharded(value, to_cpu=config.offload_to_cpu)) for name, value in entries.items())


def _full(unit: Any, entries: dict[str, Any], config: FullStateDictConfig) -> Iterator[tuple[str, Any]]:
    keep = not config.rank0_only or unit.rank == 0
    tensors = ((name, value) for name, value in entries.items() if isinstance(value, torch.Tensor))
    for name, value in gather_in_buckets(tensors, bucket_bytes=_BUCKET_BYTES, keep=keep):
        if value is None and entries[name] in unit._ignored_params:
            value = entries[name].detach()  # FSDP1 keeps out of the other ranks' dicts only what it manages
        if value is not None:
            owned = value if isinstance(entries[name], DTensor) else value.clone()
            yield name, owned.cpu() if config.offload_to_cpu else owned
    if keep:
        yield from ((name, value) for name, value in entries.items() if not isinstance(value, torch.Tensor))


def copy_sharded(value: Any, *, to_cpu: bool) -> Any:
    """A copy that later steps do not change, sharded as it was; on its device or in CPU memory."""
    if not isinstance(value, torch.Tensor):
        return value
    own = local_tensor(value)
    copied = own.to("cpu", copy=True) if to_cpu else own.clone()
    return compat.dtensor_like(copied, value) if isinstance(value, DTensor) else copied


def prepare_loading(unit: nn.Module, state_dict: dict[str, Any], prefix: str, kind: StateDictType) -> None:
    """Rename the entries below `prefix` for a unit, and lay them out like its parameters.

    Raises:
        ShardError: An entry has the form of FSDP1's flat parameters.

    Ranks:
        Local, unless an entry is sharded over another mesh.
    """
    parameters = {
        clean_name(name): parameter for name, parameter in nn.Module.named_parameters(unit, remove_duplicate=False)
    }
    for name in [name for name in state_dict if name.startswith(prefix)]:
        inner = name[len(prefix) :]
        if inner.rpartition(".")[2] in ("_flat_param", "flat_param"):
            raise _flat(name)
        value = state_dict.pop(name)
        parameter = parameters.get(inner)
        if isinstance(parameter, DTensor) and isinstance(value, torch.Tensor):
            value = laid_out(value, parameter, is_local=kind is StateDictType.LOCAL_STATE_DICT)
        state_dict[prefix + PREFIX + inner] = value


def laid_out(value: torch.Tensor, parameter: DTensor, *, is_local: bool = False) -> torch.Tensor:
    """A whole tensor, or one sharded in another way, as a DTensor placed like `parameter`."""
    if isinstance(value, DTensor):
        same = value.device_mesh == parameter.device_mesh and value.placements == parameter.placements
        return value if same else shard_like(value.full_tensor(), parameter)
    if is_local:
        own = local_tensor(parameter)
        return compat.dtensor_like(value.to(own.device), parameter) if value.shape == own.shape else value
    return shard_like(value, parameter) if value.shape == parameter.shape else value


def _flat(name: str) -> ShardError:
    return ShardError(
        f"{name} is a flat parameter of FSDP1",
        where="load_state_dict",
        why="FSDP2 keeps every parameter by itself; a flat one says nothing about the parts it is made of",
        fix="save a FULL or SHARDED state dict with FSDP1, or convert the checkpoint: shardwise ckpt convert",
    )
