"""Groups of a single rank: no communication, so parameters and gradients are cast once, on the compute stream.

FSDP2 casts a parameter and then copies it, and copies a gradient twice, through buffers of separate streams.
Activations cannot reuse the memory of such buffers, so a full GPU maps and unmaps memory in each step.
"""

import functools
import typing
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from shardwise.compat.dtensor import preserved_version
from shardwise.compat.fsdp import param_groups

_foreach_reduce = _fsdp_param_group.foreach_reduce
_NUM_RESULTS = len(typing.get_args(typing.get_type_hints(_foreach_reduce)["return"]))  # 6 before torch 2.12, then 7


def cast_instead_of_copies(model: nn.Module) -> None:
    """Avoid the copies in groups of one rank without offloading or tensor subclasses."""
    for group in param_groups(model):
        if group.mesh_info.shard_mesh_size == 1 and any(map(_has_extension, group.fsdp_params)):
            group.wait_for_unshard = functools.partial(_copy_extensions, group, group.wait_for_unshard)
        elif group.mesh_info.mesh.size() == 1 and not any(record.offload_to_cpu for record in group.fsdp_params):
            group.wait_for_unshard = functools.partial(_unshard, group, group.wait_for_unshard)
            for record in group.fsdp_params:
                record._shardwise_group = group
            _fsdp_param_group.foreach_reduce = _reduce


def keep_gradient_dtype(model: nn.Module) -> bool:
    """Keep gradients in the compute dtype unless accumulated, because a cast would not add precision.

    Returns:
        Whether all groups of the tree do so.
    """
    records = [record for group in param_groups(model) for record in group.fsdp_params]
    if not records or not all(hasattr(record, "_shardwise_group") for record in records):
        return False
    for record in records:
        record.sharded_param.grad_dtype = None
    return True


def _has_extension(record: Any) -> bool:
    return hasattr(record._sharded_local_tensor, "fsdp_pre_all_gather")


def _copy_extensions(group: Any, wait_for_unshard: Callable[[], None]) -> None:
    """Copy all inner tensors of subclass parameters; with one shard, torch copies only the first."""
    for record in filter(_has_extension, group.fsdp_params if group._all_gather_result is not None else ()):
        parts = record.all_gather_inputs
        sizes, dtypes = [part.numel() for part in parts], [part.dtype for part in parts]
        record.init_all_gather_outputs(sizes, dtypes, 1, group.device)
        for output, part in zip(record.all_gather_outputs[1:], parts[1:], strict=True):
            output.untyped_storage().resize_(output.nbytes)
            with preserved_version(output):
                output.copy_(part)
    wait_for_unshard()


def _unshard(group: Any, wait_for_unshard: Callable[[], None]) -> None:
    """Copy each shard into the unsharded parameter, which casts it; torch would first create a copy in that dtype."""
    if group._all_gather_result is None:
        return
    dtypes = [(record, record.param_dtype) for record in group.fsdp_params]
    for record, dtype in dtypes:
        shard = record._sharded_param_data
        record.init_all_gather_outputs([shard.numel()], [dtype or shard.dtype], 1, group.device)
        record.param_dtype = None
    try:
        wait_for_unshard()
    finally:
        for record, dtype in dtypes:
            record.param_dtype = dtype


@torch.no_grad()
def _reduce(records: list[Any], gradients: list[torch.Tensor], *rest: Any, **options: Any) -> Any:
    group = getattr(records[0], "_shardwise_group", None)
    if group is None or group.gradient_divide_factor is not None or group._all_reduce_hook is not None:
        return _foreach_reduce(records, gradients, *rest, **options)
    for record in records:
        _add_gradient(record, gradients.pop(0))  # frees each gradient after its cast
    stream = group.device_handle.current_stream()
    event = stream.record_event()
    return (None, event, event, None, None, None) if _NUM_RESULTS == 6 else (None, event, stream, event, *[None] * 3)


def _add_gradient(record: Any, gradient: torch.Tensor) -> None:
    parameter, gradient = record.sharded_param, gradient.reshape(record.sharded_size).contiguous()
    if parameter.grad is None:
        gradient = gradient if parameter.grad_dtype is None else gradient.to(parameter.dtype)
        parameter.grad = record.to_sharded_dtensor(gradient)
    elif parameter.grad.dtype == parameter.dtype:
        parameter.grad.to_local().add_(gradient)
    else:
        total = parameter.grad.to_local().to(parameter.dtype).add_(gradient)
        parameter.grad = record.to_sharded_dtensor(total)
    hooks: Iterable[Callable[[torch.Tensor], None]] = (parameter._post_accumulate_grad_hooks or {}).values()
    for hook in hooks:
        hook(parameter)
