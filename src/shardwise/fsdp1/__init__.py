"""FSDP1's API running on FSDP2: change the import, and an FSDP1 script runs as it is.

    from shardwise.fsdp1 import FullyShardedDataParallel as FSDP, ShardingStrategy, MixedPrecision

Module for module as in torch.distributed.fsdp: `wrap`, `api`, `sharded_grad_scaler`, `fully_sharded_data_parallel`.

Names load on first use: the codemod in this package must not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
    from torch.distributed.fsdp import FSDPModule as FSDPModule
    from torch.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
    from torch.distributed.fsdp import OffloadPolicy as OffloadPolicy
    from torch.distributed.fsdp import UnshardHandle as UnshardHandle
    from torch.distributed.fsdp import fully_shard as fully_shard
    from torch.distributed.fsdp import register_fsdp_forward_method as register_fsdp_forward_method

    from shardwise.checkpointing.flat.flat_recording import record_flat_params as record_flat_params
    from shardwise.fsdp1.api import BackwardPrefetch as BackwardPrefetch
    from shardwise.fsdp1.api import CPUOffload as CPUOffload
    from shardwise.fsdp1.api import FullOptimStateDictConfig as FullOptimStateDictConfig
    from shardwise.fsdp1.api import FullStateDictConfig as FullStateDictConfig
    from shardwise.fsdp1.api import LocalOptimStateDictConfig as LocalOptimStateDictConfig
    from shardwise.fsdp1.api import LocalStateDictConfig as LocalStateDictConfig
    from shardwise.fsdp1.api import MixedPrecision as MixedPrecision
    from shardwise.fsdp1.api import OptimStateDictConfig as OptimStateDictConfig
    from shardwise.fsdp1.api import OptimStateKeyType as OptimStateKeyType
    from shardwise.fsdp1.api import ShardedOptimStateDictConfig as ShardedOptimStateDictConfig
    from shardwise.fsdp1.api import ShardedStateDictConfig as ShardedStateDictConfig
    from shardwise.fsdp1.api import ShardingStrategy as ShardingStrategy
    from shardwise.fsdp1.api import StateDictConfig as StateDictConfig
    from shardwise.fsdp1.api import StateDictSettings as StateDictSettings
    from shardwise.fsdp1.api import StateDictType as StateDictType
    from shardwise.fsdp1.fully_sharded_data_parallel import FullyShardedDataParallel as FullyShardedDataParallel
    from shardwise.fsdp1.units import FlatParameter as FlatParameter

_HOMES = {
    "torch.distributed.fsdp": (
        "CPUOffloadPolicy",
        "FSDPModule",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "UnshardHandle",
        "fully_shard",
        "register_fsdp_forward_method",
    ),
    "shardwise.checkpointing.flat.flat_recording": ("record_flat_params",),
    "shardwise.fsdp1.api": (
        "BackwardPrefetch",
        "CPUOffload",
        "FullOptimStateDictConfig",
        "FullStateDictConfig",
        "LocalOptimStateDictConfig",
        "LocalStateDictConfig",
        "MixedPrecision",
        "OptimStateDictConfig",
        "OptimStateKeyType",
        "ShardedOptimStateDictConfig",
        "ShardedStateDictConfig",
        "ShardingStrategy",
        "StateDictConfig",
        "StateDictSettings",
        "StateDictType",
    ),
    "shardwise.fsdp1.fully_sharded_data_parallel": ("FullyShardedDataParallel",),
    "shardwise.fsdp1.units": ("FlatParameter",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # pyright: ignore


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'shardwise.fsdp1' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
