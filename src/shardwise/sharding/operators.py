"""Operators on DTensors that torch refuses, or answers with what one rank holds."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.sharding.inventory import local_part, local_tensor
from shardwise.sharding.shard_views import watch_views, write_whole

_aten: Any = torch.ops.aten
_DRAW_IN_PLACE = (_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float)
_DRAW_LIKE = (_aten.rand_like.default, _aten.randn_like.default)


@functools.cache
def mend_operators() -> None:
    """Answer them for the whole tensor, in this process, from now on."""
    compat.answer_operator(_aten._local_scalar_dense.default, _item)
    compat.answer_operator(_aten.index_put_.default, _write_masked)
    for operator in (_aten.pow_.Scalar, _aten.clamp_min_.default):
        compat.answer_operator(operator, _reduce_first)
    compat.answer_operator(_aten.eye.m_out, _eye)
    for operator in (*_DRAW_IN_PLACE, *_DRAW_LIKE):
        compat.answer_operator(operator, functools.partial(_draw, operator))
    watch_views()


def _item(plain: Callable[[], Any], args: Any, kwargs: Any) -> Any:
    """`norm.item()`: torch returns this rank's part of a sum that is still to be reduced."""
    tensor = args[0]
    is_whole = all(placement.is_replicate() for placement in tensor.placements)
    return plain() if is_whole else tensor.full_tensor().item()


def _write_masked(plain: Callable[[], Any], args: Any, kwargs: Any) -> Any:
    """`tensor[mask] = value`: torch knows no way, but a mask laid out like the tensor concerns each part by itself."""
    tensor, indices, value, *rest = args
    if all(each.is_replicate() for part in (tensor, *indices, value) for each in getattr(part, "placements", ())):
        local = [index if index is None else local_tensor(index) for index in indices]
        local_tensor(tensor).index_put_(local, local_tensor(value), *rest, **kwargs)
        return tensor  # a scalar's mask, which torch has turned into plain indices
    mask = indices[0] if len(indices) == 1 else None
    is_laid_out_alike = isinstance(mask, DTensor) and mask.dtype == torch.bool and mask.placements == tensor.placements
    if mask is None or not is_laid_out_alike or mask.shape != tensor.shape or value.numel() != 1:
        return write_whole(_aten.index_put_.default, args, kwargs, plain)
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    local_tensor(tensor).index_put_([local_tensor(mask)], whole, *rest, **kwargs)
    return tensor


def _reduce_first(plain: Callable[[], Any], args: Any, kwargs: Any) -> Any:
    """`norm.square_()`, `F.normalize`: torch refuses to write to what is still to be reduced."""
    if any(placement.is_partial() for placement in args[0].placements):
        compat.reduce_in_place(args[0])
    return plain()


def _eye(plain: Callable[[], Any], args: Any, kwargs: Any) -> Any:
    """`nn.init.eye_`: torch makes every rank's part the whole matrix."""
    tensor = kwargs["out"]
    local_tensor(tensor).copy_(local_part(torch.eye(*tensor.shape, dtype=tensor.dtype, device=tensor.device), tensor))
    return tensor


def _draw(operator: Any, plain: Callable[[], Any], args: Any, kwargs: Any) -> Any:
    """Random numbers on CPUs: from generators in the same state every rank would draw the same ones for its part."""
    tensor = args[0]
    local = local_tensor(tensor)
    if local.device.type != "cpu" or all(placement.is_replicate() for placement in tensor.placements):
        return plain()
    whole = operator(torch.empty(tensor.shape, dtype=kwargs.get("dtype") or local.dtype), *args[1:], **kwargs)
    if operator in _DRAW_LIKE:
        return compat.dtensor_like(local_part(whole, tensor).contiguous(), tensor)
    local.copy_(local_part(whole, tensor))
    return tensor
