"""`parameter.data = value` on a sharded parameter: torch ignores it; here the values arrive, or it is refused."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.errors import ShardError
from shardwise.sharding.layout import local_part, local_tensor

_MARK = "_shardwise_sharded"
_is_watching = False


def watch_assignments(model: nn.Module) -> None:
    """Make assignments to `.data` of the model's sharded parameters mean what they say.

    Ranks:
        Local.
    """
    global _is_watching
    if not _is_watching:
        compat.watch_data_assignment(_assign)
        _is_watching = True
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            parameter.__dict__[_MARK] = True


def _assign(parameter: DTensor, value: torch.Tensor) -> bool:
    """Copy the values in place; False leaves a tensor that is not ours to torch."""
    if _MARK not in parameter.__dict__:
        return False
    local = local_tensor(parameter)
    if value.shape != parameter.shape or value.dtype != parameter.dtype:
        raise ShardError(
            f"`.data` of a sharded parameter, {list(parameter.shape)} {parameter.dtype}, was assigned "
            f"{list(value.shape)} {value.dtype}",
            where="parameter.data = ...",
            why="its group gathers the shard it was made with; torch would ignore the assignment",
            fix="change shape or dtype before sharding; ShardConfig.precision sets the dtype of computation",
        )
    own = local_tensor(value) if isinstance(value, DTensor) else local_part(value, parameter)
    if isinstance(value, DTensor) and value.placements != parameter.placements:
        raise ShardError(
            f"`.data` of a parameter laid out as {parameter.placements} was assigned one of {value.placements}",
            where="parameter.data = ...",
            why="ranks would keep each other's parts",
            fix="assign a tensor of the same layout, or the whole tensor",
        )
    if not local.is_meta and own.data_ptr() != local.data_ptr():
        with torch.no_grad():
            local.copy_(own)
    return True
