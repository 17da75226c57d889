"""Torch's names as rules know them: one public spelling for each of the paths a name can be imported by."""

from __future__ import annotations

import re

FULLY_SHARD = "torch.distributed.fsdp.fully_shard"
FSDP1 = "torch.distributed.fsdp.FullyShardedDataParallel"
FSDP2_NAMES = frozenset(
    {
        "fully_shard",
        "FSDPModule",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "CPUOffloadPolicy",
        "UnshardHandle",
        "register_fsdp_forward_method",
        "share_comm_ctx",
    }
)
"""What `torch.distributed.fsdp` has of FSDP2."""
FSDP1_NAMES = frozenset(
    {
        "BackwardPrefetch",
        "CPUOffload",
        "FullOptimStateDictConfig",
        "FullStateDictConfig",
        "FullyShardedDataParallel",
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
    }
)
"""What `torch.distributed.fsdp` has of FSDP1."""
STATE_DICT_NAMES = frozenset(
    {
        "StateDictOptions",
        "get_model_state_dict",
        "get_optimizer_state_dict",
        "get_state_dict",
        "set_model_state_dict",
        "set_optimizer_state_dict",
        "set_state_dict",
    }
)
"""What `torch.distributed.checkpoint.state_dict` has."""

# Each path on the left is also reachable, publicly and for longer, by the one on the right.
_PUBLIC = [
    (re.compile(rf"^{private}(?=\.)"), public)
    for private, public in [
        (r"torch\.distributed\._composable\.fsdp(\.fully_shard(?=\.)|\._\w+)?", "torch.distributed.fsdp"),
        (r"torch\.distributed\._composable(?=\.fully_shard$)", "torch.distributed.fsdp"),
        (r"torch\.distributed\.fsdp\._fully_shard(\._\w+)*", "torch.distributed.fsdp"),
        (r"torch\.distributed\.fsdp\.(fully_sharded_data_parallel|api)", "torch.distributed.fsdp"),
        (r"torch\.distributed\._tensor(\.api)?", "torch.distributed.tensor"),
        (r"torch\.distributed\._device_mesh", "torch.distributed.device_mesh"),
        (r"torch\.distributed\.checkpoint\.(state_dict_saver|state_dict_loader)", "torch.distributed.checkpoint"),
        (r"torch\.distributed\.distributed_c10d", "torch.distributed"),
        (r"torch\.distributed\.tensor\.device_mesh", "torch.distributed.device_mesh"),
        (r"torch\.nn\.utils\.clip_grad", "torch.nn.utils"),
        (r"torch\.nn\.modules(\.[a-z_0-9]+)?", "torch.nn"),
        (r"torch\.optim\.(?!lr_scheduler|swa_utils)[a-z_]+(?=\.[A-Z])", "torch.optim"),
        (r"torch\.nn\.parallel\.distributed", "torch.nn.parallel"),
    ]
]


def canonical(dotted: str) -> str:
    """The public spelling of a dotted torch name; any other name as it is."""
    if not dotted.startswith("torch."):
        return dotted
    for pattern, public in _PUBLIC:
        dotted = pattern.sub(public, dotted)
    return dotted
