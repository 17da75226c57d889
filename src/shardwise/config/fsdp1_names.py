"""FSDP1's settings by name, for migration and for configs written for FSDP1. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
"""Names of sharding strategies; a config may also give their numbers, 1 to 5 in this order."""
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
"""Strategies that shard inside a machine and replicate across machines."""
KEEPS_UNSHARDED = ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2", "NO_SHARD")
"""Strategies that keep parameters unsharded after forward: `reshard_after_forward=False`."""
NOT_NEEDED = {
    "limit_all_gathers": "FSDP2 never gathers further ahead than the prefetch says",
    "use_orig_params": "parameters always keep their own names and shapes: check optimizer groups made by either",
    "flatten_parameters": "parameters are never flattened",
    "backward_prefetch": "FSDP2 always gathers the next group early, as BACKWARD_PRE does; memory may change",
    "forward_prefetch": "FSDP2 overlaps gathering in forward by itself: set_modules_to_forward_prefetch asks for more",
    "activation_checkpointing_reentrant": "recomputation is never reentrant under FSDP2; the values are the same",
}
"""Settings that FSDP2 does not need, and its behavior instead."""


def member_name(value: Any, members: Iterable[str] = STRATEGIES) -> str | None:
    """Return the name of an enum member, given as member, name in any case, or number from 1; None if unknown."""
    names = list(members)
    text = str(getattr(value, "name", value)).strip().upper().rpartition(".")[2]
    if text.isdigit() and not isinstance(value, bool):
        index = int(text) - 1
        return names[index] if 0 <= index < len(names) else None
    return next((name for name in names if name.lstrip("_") == text.lstrip("_")), None)
