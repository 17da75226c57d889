"""FSDP1's private APIs that shardwise needs."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import wrap

# Private names that scripts use.
or_policy, module_wrap_policy, Policy = wrap._or_policy, wrap._module_wrap_policy, wrap._Policy


def default_comm_hooks() -> Any:
    """The module with the gradient hooks that torch ships for FSDP1."""
    from torch.distributed.algorithms._comm_hooks import default_hooks

    return default_hooks


def fsdp1_flat_params(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """FSDP1's flat parameters in a wrapped model, each with the name of its wrapped module."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield name, module._handle.flat_param


def flat_param_entries(flat_param: Any) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name (in the wrapped module), shape and offset of each parameter in a flat parameter of FSDP1."""
    names = iter(zip(flat_param._fqns, flat_param._shapes, strict=True))
    start = 0
    for numel, is_padding in zip(flat_param._numels_with_padding, flat_param._is_padding_mask, strict=True):
        if not is_padding:
            name, shape = next(names)
            yield name, tuple(shape), start
        start += numel


def flat_param_ties(flat_param: Any) -> Iterator[tuple[str, str]]:
    """Additional names of tied parameters in a flat parameter of FSDP1, each with the stored name."""
    for info in flat_param._shared_param_infos:
        also, stored = (info.module_name, info.param_name), (info.prim_module_name, info.prim_param_name)
        yield ".".join(filter(None, also)), ".".join(filter(None, stored))


def flat_param_numel(flat_param: Any) -> int:
    """Number of elements of an unsharded flat parameter of FSDP1, without the last rank's padding."""
    return flat_param._unpadded_unsharded_size.numel()
