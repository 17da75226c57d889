"""register_comm_hook(): FSDP1's gradient hooks, where FSDP2 has a place for them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import ShardingStrategy

from shardwise import compat
from shardwise.errors import ConfigError
from shardwise.fsdp1.meshes import HYBRID

_TORCHS = compat.default_comm_hooks()
_COMPRESS = {_TORCHS.fp16_compress_hook: torch.float16, _TORCHS.bf16_compress_hook: torch.bfloat16}
_AS_EVER = (_TORCHS.allreduce_hook, _TORCHS.reduce_scatter_hook)


class HookedReduceScatter:
    """Lets a hook of FSDP1 do a unit's reduction: `hook(state, whole gradient, this rank's part)`."""

    def __init__(self, state: object, hook: Callable[..., None]) -> None:
        self.state, self.hook = state, hook

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a gradient."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce; the hook divides, as FSDP1's hooks do."""
        self.hook(self.state, input_tensor, output_tensor)


def register(units: Sequence[Any], state: object, hook: Callable[..., None]) -> None:
    """Register a hook of FSDP1 for every unit.

    Args:
        units: Of one model, the root included.
        state: Handed to the hook.
        hook: torch's own, or one with the signature for sharded strategies.

    Raises:
        ConfigError: FSDP1 refuses it too, or FSDP2 has no place for it.

    Ranks:
        Local.
    """
    if not callable(hook):
        raise _refused(f"the hook is {hook!r}", "it is called with every gradient", "pass a function")
    for unit in units:
        if unit.sharding_strategy in HYBRID:
            fix = "use MixedPrecision(reduce_dtype=...) to send fewer bytes"
            raise _refused(f"the strategy is {unit.sharding_strategy.name}", "FSDP1 has no hooks for it either", fix)
        if unit.has_comm_hook:
            raise _refused("a hook is registered already", "a gradient is reduced once", "register one")
    for unit in units:
        _register(unit, state, hook)
        unit.has_comm_hook = True


def _register(unit: Any, state: object, hook: Callable[..., None]) -> None:
    groups = compat.state_param_groups(compat.fsdp_state(unit))
    if hook in _COMPRESS:
        for group in groups:
            compat.set_reduce_dtype(group, _COMPRESS[hook])
    elif hook in _AS_EVER:
        return
    elif unit.sharding_strategy is ShardingStrategy.NO_SHARD:
        fix = "use DistributedDataParallel, whose hooks do that"
        raise _refused("the strategy is NO_SHARD", "FSDP2 reduces between copies by itself", fix)
    elif groups:
        unit.set_custom_reduce_scatter(HookedReduceScatter(state, hook))
        # FSDP2 must neither divide before nor after: the hook does.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _refused(what: str, why: str, fix: str) -> ConfigError:
    return ConfigError(what, where="register_comm_hook", why=why, fix=fix)
