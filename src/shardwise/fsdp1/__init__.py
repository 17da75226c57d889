"""FSDP1's API running on FSDP2: change the import, and an FSDP1 script runs as it is.

    from shardwise.fsdp1 import FullyShardedDataParallel as FSDP, ShardingStrategy, MixedPrecision

Module for module as in torch.distributed.fsdp: `wrap`, `api`, `sharded_grad_scaler`, `fully_sharded_data_parallel`.

Names load on first use: the codemod in this package must not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.fsdp import *  # noqa: F403

    from shardwise.checkpointing.formats.fsdp1 import record_flat_params as record_flat_params
    from shardwise.fsdp1.fully_sharded_data_parallel import FullyShardedDataParallel as FullyShardedDataParallel
    from shardwise.fsdp1.units import FlatParameter as FlatParameter

_OURS = {
    "FlatParameter": "shardwise.fsdp1.units",
    "FullyShardedDataParallel": "shardwise.fsdp1.fully_sharded_data_parallel",
    "record_flat_params": "shardwise.checkpointing.formats.fsdp1",
}
_TORCHS = (
    "BackwardPrefetch", "CPUOffload", "CPUOffloadPolicy", "FSDPModule", "FullOptimStateDictConfig",
    "FullStateDictConfig", "LocalOptimStateDictConfig", "LocalStateDictConfig", "MixedPrecision",
    "MixedPrecisionPolicy", "OffloadPolicy", "OptimStateDictConfig", "OptimStateKeyType",
    "ShardedOptimStateDictConfig", "ShardedStateDictConfig", "ShardingStrategy", "StateDictConfig",
    "StateDictSettings", "StateDictType", "UnshardHandle", "fully_shard", "register_fsdp_forward_method",
)  # fmt: skip

__all__ = sorted((*_OURS, *_TORCHS))  # pyright: ignore


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shardwise.fsdp1' has no attribute {name!r}")
    value = getattr(import_module(_OURS.get(name, "torch.distributed.fsdp")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
