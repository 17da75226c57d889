"""What FSDP2 gets wrong when a gradient is a sum.

Before torch 2.15, where parameters are not used in every micro-step: (1) a group that has never run raises an
AttributeError while reduction is off; (2) a parameter whose first gradient comes with the last micro-step has another
dtype than the accumulated ones and fails an assertion (pytorch#196996); (3) HSDP's partial sums are dropped, or added
to the wrong parameters, when the micro-steps did not use the same ones.

Since torch 2.15, where the reduce dtype is narrower than the compute dtype: autograd rounds each gradient of a
parameter that is used twice before it adds them.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from shardwise.compat.fsdp import param_groups, unsharded_parameters

# Since torch 2.15 gradients accumulate in `grad` of the unsharded parameter, in its `grad_dtype`.
_HAS_GRAD_DTYPE = not hasattr(FSDPParam, "to_accumulated_grad_if_needed")


def patch_accumulation(model: nn.Module) -> None:
    """Make the sums right in the whole tree; repeatable."""
    for group in param_groups(model):
        patch_group(group)


def patch_group(group: Any) -> None:
    """The same for one group."""
    if hasattr(group, "_shardwise_patched"):
        return
    group._shardwise_patched = True
    if _HAS_GRAD_DTYPE:
        group.wait_for_unshard = functools.partial(_wait_and_widen, group, group.wait_for_unshard)
    else:
        group.post_backward = functools.partial(_patched_post_backward, group, group.post_backward)


def _wait_and_widen(group: Any, wait_for_unshard: Callable[[], None]) -> None:
    wait_for_unshard()
    for parameter in unsharded_parameters(group):
        dtype = parameter.grad_dtype
        if dtype is not None and dtype.itemsize < parameter.dtype.itemsize:
            parameter.grad_dtype = None  # as autograd computes it; the reduction rounds the sum


def zero_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Zeros that can be the gradient of an unsharded parameter."""
    return torch.zeros_like(parameter, dtype=parameter.grad_dtype, requires_grad=False)


def partial_sums(group: Any) -> dict[Any, tuple[int, int]]:
    """The parameters in what HSDP has summed over shards and not yet over replicas, with first element and length."""
    return {} if group._partial_reduce_output is None else getattr(group, "_partial_reduce_output_layout", {})


def lay_out_partial_sums(group: Any, params: Iterable[Any]) -> None:
    """Let HSDP's partial sums be those of `params` alone, zero where one had none yet."""
    before, after, parts = partial_sums(group), {}, []
    # The sum was written on this stream and is read on it next.
    with group.device_handle.stream(group.comm_ctx.reduce_scatter_stream):
        partial, start = group._partial_reduce_output, 0
        for param in params:
            numel = param.padded_sharded_param_size.numel()
            after[param] = (start, numel)
            start += numel
            if partial is not None:
                parts.append(partial.narrow(0, *before[param]) if param in before else partial.new_zeros(numel))
        group._partial_reduce_output = torch.cat(parts) if parts else None
    group._partial_reduce_output_layout = after


def _patched_post_backward(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    gathered = [param for param in group.fsdp_params if hasattr(param, "_unsharded_param")]
    if not gathered and not group.reduce_grads:
        group._training_state = type(group._training_state).POST_BACKWARD
        return
    if group.reduce_grads:
        _unify_dtype(group, gathered)
        _complete_partial_sums(group, gathered)
    post_backward(*unused)


def _unify_dtype(group: Any, gathered: list[Any]) -> None:
    """Where some gradients wait in the reduce dtype, bring the others to it."""
    if all(param.unsharded_accumulated_grad is None for param in gathered):
        return
    for param in gathered:
        if param.unsharded_accumulated_grad is not None:
            continue
        param.to_accumulated_grad_if_needed()
        if _is_reduced_as_zero(group, param):
            zeros = torch.zeros_like(param._unsharded_param, dtype=param.reduce_dtype, requires_grad=False)
            param.unsharded_accumulated_grad = zeros


def _complete_partial_sums(group: Any, gathered: list[Any]) -> None:
    """Make this reduction and the HSDP partial sum before it cover the same parameters."""
    before = partial_sums(group)
    if not before and group.all_reduce_grads:
        return
    now = {param for param in gathered if _has_gradient(param) or _is_reduced_as_zero(group, param)}
    for param in before.keys() - now:
        param._unsharded_param.grad = zero_gradient(param._unsharded_param)
    both = [param for param in group.fsdp_params if param in now or param in before]
    if both != list(before):
        lay_out_partial_sums(group, both)


def _has_gradient(param: Any) -> bool:
    return param.unsharded_accumulated_grad is not None or param._unsharded_param.grad is not None


def _is_reduced_as_zero(group: Any, param: Any) -> bool:
    unused_too = getattr(group, "reduce_scatter_unused_params", False)  # torch >= 2.12
    return unused_too and param._unsharded_param.requires_grad and not _has_gradient(param)
