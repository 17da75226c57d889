"""`MixedPrecision.buffer_dtype`: buffers cast once, and saved in the dtype they had."""

from typing import Any

import torch
from torch import nn

from shardwise.fsdp1.names import clean_name

_BEFORE = "_shardwise_buffer_dtypes"


def cast_buffers(units: list[Any]) -> None:
    """Cast the floating-point buffers of each unit to its `buffer_dtype`, inner units first.

    Args:
        units: All units of a model, outer ones first; each says which modules it ignores.

    Ranks:
        Local.
    """
    done: set[nn.Module] = set()
    cast: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for unit in reversed(units):
        dtype = unit.mixed_precision.buffer_dtype
        for owner in unit.modules():
            if owner in done:
                continue
            done.add(owner)
            if dtype is not None and owner not in unit._ignored_modules:
                _cast_own(owner, dtype, cast)


def _cast_own(owner: nn.Module, dtype: torch.dtype, cast: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
    for name, buffer in owner._buffers.items():
        if buffer is None or not buffer.is_floating_point() or buffer.dtype == dtype:
            continue
        owner.__dict__.setdefault(_BEFORE, {})[name] = buffer.dtype
        if id(buffer) not in cast:  # a buffer under two names stays one; the old one is held so that ids stay apart
            cast[id(buffer)] = (buffer, buffer.to(dtype))
        owner._buffers[name] = cast[id(buffer)][1]


def dtypes_before(module: nn.Module) -> dict[str, torch.dtype]:
    """Clean names of the buffers that were cast, with the dtype each had."""
    return {
        clean_name(f"{path}.{name}" if path else name): dtype
        for path, owner in module.named_modules()
        for name, dtype in owner.__dict__.get(_BEFORE, {}).items()
    }
