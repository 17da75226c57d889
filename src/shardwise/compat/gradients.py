"""Gradients of FSDP2's parameter groups: accumulation, reduction, clearing, unused parameters."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction
from torch.distributed.tensor import DTensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from shardwise.compat.fsdp import fsdp_states, param_groups


def reduces_gradients(group: Any) -> bool:
    """Whether this backward's gradients become final: reduced over all ranks, replicas included."""
    return group.reduce_grads and group.all_reduce_grads


def reduce_when_backward_ends(group: Any) -> None:
    """Keep a group gathered until backward is over, instead of freeing it when its first input has a gradient.

    It is also left out of the order that backward prefetches by: that order must be the same on every rank, and a
    gathered group is kept even where its module did not run.
    """
    group._register_post_backward_hook = lambda args, kwargs: (args, kwargs)
    group._record_post_forward = lambda: None


def before_post_backward(group: Any, callback: Callable[[], None]) -> None:
    """Call `callback` just before a group collects its gradients for reduction."""
    _mend_group(group)  # the mending must see what callbacks add, so it is the innermost
    post_backward = group.post_backward

    def call_then_reduce(*unused: Any) -> None:
        callback()
        post_backward(*unused)

    group.post_backward = call_then_reduce


def replace_post_backward_hook(group: Any, register: Callable[[Any, Any, Any], tuple[Any, Any]]) -> None:
    """Let `register(group, args, kwargs)` hang the group's post-backward on the inputs of a call."""
    group._register_post_backward_hook = functools.partial(register, group)


def reduce_after_backward_of(group: Any, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors as seen through a node that runs the group's post-backward when their gradients are known."""
    return RegisterPostBackwardFunction.apply(group, *tensors)


@contextlib.contextmanager
def gradient_sync(model: nn.Module, *, reduce: bool, all_reduce: bool, is_last: bool) -> Iterator[None]:
    """Set FSDP2's accumulation switches in the whole tree, and put back what was there on leaving."""
    groups = [(group, group.reduce_grads, group.all_reduce_grads) for group in param_groups(model)]
    # Before the first forward every state has a context of its own; afterwards all share the root's.
    contexts = {id(state._state_ctx): state._state_ctx for state in fsdp_states(model)}.values()
    last = [(context, context.is_last_backward) for context in contexts]
    try:
        for group, *_ in groups:
            group.reduce_grads, group.all_reduce_grads = reduce, reduce and all_reduce
        for context, _ in last:
            context.is_last_backward = is_last
        yield
    finally:
        for group, reduce_before, all_reduce_before in groups:
            group.reduce_grads, group.all_reduce_grads = reduce_before, all_reduce_before
        for context, is_last_before in last:
            context.is_last_backward = is_last_before


def mend_accumulation(model: nn.Module) -> None:
    """Make FSDP2's accumulation right for parameters that not every micro-step uses; repeatable.

    Up to torch 2.13 (1) a group that has never run raises an AttributeError while reduction is off, (2) a
    parameter whose first gradient comes with the last micro-step has another dtype than the accumulated ones
    and fails an assertion (pytorch#196996), (3) HSDP's partial sums are dropped, or added to the wrong
    parameters, when the micro-steps did not use the same parameters.
    """
    for group in param_groups(model):
        _mend_group(group)


def _mend_group(group: Any) -> None:
    if not hasattr(group, "_shardwise_partial"):
        group._shardwise_partial = []  # the parameters in `_partial_reduce_output`, in its order
        group.post_backward = functools.partial(_mended_post_backward, group, group.post_backward)


def _mended_post_backward(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    gathered = [param for param in group.fsdp_params if hasattr(param, "_unsharded_param")]
    if not gathered and not group.reduce_grads:
        group._training_state = type(group._training_state).POST_BACKWARD
        return
    if group.reduce_grads:
        _give_one_dtype(group, gathered)
        _complete_partial_sums(group, gathered)
    post_backward(*unused)


def _give_one_dtype(group: Any, gathered: list[Any]) -> None:
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
    if not group._is_hsdp:
        return
    before = group._shardwise_partial if group._partial_reduce_output is not None else []
    now = {param for param in gathered if _has_gradient(param) or _is_reduced_as_zero(group, param)}
    either = now.union(before)
    both = [param for param in group.fsdp_params if param in either]
    if before and len(before) < len(both):
        group._partial_reduce_output = _spread_partial_sum(group, before, both)
    for param in either - now:
        param._unsharded_param.grad = torch.zeros_like(param._unsharded_param, requires_grad=False)
    group._shardwise_partial = [] if group.all_reduce_grads else both


def _spread_partial_sum(group: Any, before: list[Any], both: list[Any]) -> torch.Tensor:
    """The partial sum of `before`, with zeros where a parameter of `both` has none yet."""
    # The sum was written on this stream and is read on it next.
    with group.device_handle.stream(group.comm_ctx.reduce_scatter_stream):
        partial = group._partial_reduce_output
        parts = dict(zip(before, partial.split([_shard_numel(param) for param in before]), strict=True))
        return torch.cat([parts.get(param, partial.new_zeros(_shard_numel(param))) for param in both])


def _shard_numel(param: Any) -> int:
    return param.padded_sharded_param_size.numel()


def _has_gradient(param: Any) -> bool:
    return param.unsharded_accumulated_grad is not None or param._unsharded_param.grad is not None


def _is_reduced_as_zero(group: Any, param: Any) -> bool:
    unused_too = getattr(group, "reduce_scatter_unused_params", False)  # torch >= 2.12
    return unused_too and param._unsharded_param.requires_grad and not _has_gradient(param)


def drop_gradients(model: nn.Module) -> None:
    """Forget every gradient of the tree: reduced ones, and those that still wait unreduced."""
    clear_gradients(param_groups(model), set(model.modules()), set_to_none=True)
    for parameter in model.parameters():
        parameter.grad = None


def clear_gradients(groups: Iterable[Any], modules: set[nn.Module], *, set_to_none: bool) -> None:
    """Clear what groups keep of the gradients of `modules`' parameters: reduced, unreduced, HSDP's partial sums."""
    for group in groups:
        owners = {p: (p._module_info.module, *p._module_info.shared_modules) for p in group.fsdp_params}
        cleared = {param for param, registering in owners.items() if not modules.isdisjoint(registering)}
        for param in cleared:
            unsharded = getattr(param, "_unsharded_param", None)
            places = (param.sharded_param, "grad"), (unsharded, "grad"), (param, "unsharded_accumulated_grad")
            for owner, name in places:
                gradient = getattr(owner, name, None)
                if gradient is not None and set_to_none:
                    setattr(owner, name, None)
                elif gradient is not None:
                    gradient.detach().zero_()
        if cleared and group._partial_reduce_output is not None:
            before = getattr(group, "_shardwise_partial", [])
            kept = [param for param in before if param not in cleared]
            group._partial_reduce_output = _spread_partial_sum(group, before, kept) if kept else None
            group._shardwise_partial = kept


def fill_unused_gradient(group: Any, fsdp_param: Any) -> bool | None:
    """Give a gathered, trainable parameter without a gradient a zero one.

    Returns:
        Whether it was filled; None when there is nothing to do: frozen, never gathered, or not reduced now.
    """
    parameter = getattr(fsdp_param, "_unsharded_param", None)
    if parameter is None or not fsdp_param.sharded_param.requires_grad:
        return None
    if fsdp_param.unsharded_accumulated_grad is not None or parameter.grad is not None:
        return False
    if not group.reduce_grads:
        return None
    parameter.grad = torch.zeros_like(parameter, requires_grad=False)
    return True


def set_reduce_dtype(group: Any, dtype: torch.dtype) -> None:
    """Sum a group's gradients in another dtype from now on."""
    group.mp_policy = dataclasses.replace(group.mp_policy, reduce_dtype=dtype)
    group._init_mp_dtypes()


class LocalGradScaler(torch.amp.GradScaler):
    """A gradient scaler that unscales this rank's part of each gradient, also in float16, and then asks `agree`."""

    def agree(self, found_inf: torch.Tensor) -> None:
        """Called with this rank's finding, to be overwritten by that of all ranks."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        shards: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (grad := parameter.grad) is not None:
                    own = grad.to_local() if isinstance(grad, DTensor) else grad
                    shards.setdefault((own.device, own.dtype), []).append(own)
        found = {found_inf.device: found_inf}
        with torch.no_grad():
            for (device, _), grads in shards.items():
                flag = found.setdefault(device, found_inf.to(device, copy=True))
                torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inv_scale.to(device))
            for flag in found.values():
                self.agree(flag)
        return found


def unsharded_gradient_bytes(group: Any) -> int:
    """Bytes of whole gradients that wait for their reduction."""
    waiting = [
        gradient
        for param in group.fsdp_params
        for gradient in (
            getattr(param, "unsharded_accumulated_grad", None),
            getattr(getattr(param, "_unsharded_param", None), "grad", None),
        )
        if gradient is not None
    ]
    return sum(gradient.numel() * gradient.element_size() for gradient in waiting)


def has_fused_kernels(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether torch's fused optimizers can change all of these."""
    devices = _get_fused_kernels_supported_devices()
    return all(p.is_floating_point() and p.device.type in devices for p in parameters)


def allow_holding_back(optimizer: torch.optim.Optimizer, allowed: bool) -> None:
    """Mark an optimizer as one that heeds what `hold_back_step` sets."""
    optimizer._step_supports_amp_scaling = allowed  # pyrefly: ignore[missing-attribute]


def hold_back_step(optimizer: torch.optim.Optimizer, is_bad: torch.Tensor) -> bool:
    """Let the next step change nothing where `is_bad` is 1, decided on the device; False where it cannot be."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):  # fused kernels take what GradScaler sets
        return False
    optimizer.grad_scale, optimizer.found_inf = None, is_bad  # pyrefly: ignore[missing-attribute]
    return True
