"""Gradients of FSDP2's parameter groups: accumulation, reduction, clearing, unused parameters."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from shardwise.compat import fsdp
from shardwise.compat.fsdp import fsdp_modules, fsdp_state, groups_of, param_groups, unsharded_parameters

# Since torch 2.15 gradients accumulate in `grad` of the unsharded parameter, in its `grad_dtype`.
_HAS_GRAD_DTYPE = not hasattr(FSDPParam, "to_accumulated_grad_if_needed")


def patch_accumulation(model: nn.Module) -> None:
    """Fix FSDP2's gradient accumulation in the whole tree; idempotent.

    Before torch 2.15, if parameters are not used in every micro-step: (1) a group that has never run raises an
    AttributeError while reduction is off; (2) the gradient of a parameter first used in the last micro-step has another
    dtype than the accumulated ones and fails an assertion (pytorch#196996); (3) HSDP's partial sums are dropped, or
    added to the wrong parameters, if micro-steps use different parameters.

    Since torch 2.15, if the reduce dtype has fewer bits than the compute dtype: autograd rounds each gradient of a
    parameter that is used twice before adding them.
    """
    for group in param_groups(model):
        patch_group(group)


def patch_group(group: Any) -> None:
    """Fix gradient accumulation of one group."""
    if hasattr(group, "_shardwise_patched"):
        return
    group._shardwise_patched = True
    if _HAS_GRAD_DTYPE:
        fsdp.around_method(group, "wait_for_unshard", after=functools.partial(_widen, group))
    else:
        group.post_backward = functools.partial(_patched_post_backward, group, group.post_backward)


def _widen(group: Any) -> None:
    for parameter in unsharded_parameters(group):
        dtype = parameter.grad_dtype
        if dtype is not None and dtype.itemsize < parameter.dtype.itemsize:
            parameter.grad_dtype = None  # autograd's own dtype; the reduction rounds the sum


def zero_gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return a zero gradient for an unsharded parameter."""
    return torch.zeros_like(parameter, dtype=parameter.grad_dtype, requires_grad=False)


def partial_sums(group: Any) -> dict[Any, tuple[int, int]]:
    """The parameters in HSDP's sum over shards that is not yet reduced over replicas, with offset and length."""
    return {} if group._partial_reduce_output is None else getattr(group, "_partial_reduce_output_layout", {})


def lay_out_partial_sums(group: Any, params: Iterable[Any]) -> None:
    """Restrict HSDP's partial sums to `params`, with zeros for missing ones."""
    before, after, parts = partial_sums(group), {}, []
    # The stream that wrote the sum and reads it next.
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
    """Cast gradients to the reduce dtype if some already have it."""
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
    """Make this reduction and the previous HSDP partial sum cover the same parameters."""
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


def reduces_gradients(group: Any) -> bool:
    """Whether backward reduces gradients over all ranks, including replicas."""
    return group.reduce_grads and group.all_reduce_grads


def reduce_when_backward_ends(group: Any) -> None:
    """Keep a group unsharded until the end of backward, instead of until its first input has a gradient.

    It is also excluded from the prefetch order of backward: that order must be the same on every rank, and the group
    stays unsharded even on ranks that did not run its module.
    """
    group._register_post_backward_hook = lambda args, kwargs: (args, kwargs)
    group._record_post_forward = lambda: None


def around_post_backward(group: Any, before: Callable[[], None], after: Callable[[], None] | None = None) -> None:
    """Call `before` before a group reduces its gradients, and `after` after it."""
    patch_group(group)  # innermost: the patch must include gradients that the callbacks add
    fsdp.around_method(group, "post_backward", before=before, after=after)


def hooks_of(parameter: torch.Tensor) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return the hooks of `register_hook` and `register_post_accumulate_grad_hook` on a parameter."""
    return (
        list((parameter._backward_hooks or {}).values()),
        list((parameter._post_accumulate_grad_hooks or {}).values()),
    )


def replace_post_backward_hook(group: Any, register: Callable[[Any, Any, Any], tuple[Any, Any]]) -> None:
    """Let `register(group, args, kwargs)` attach the group's post-backward to the inputs of a call."""
    group._register_post_backward_hook = functools.partial(register, group)


def reduce_after_backward_of(group: Any, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the tensors through an autograd node that runs the group's post-backward after their gradients."""
    return _PostBackward.apply(group, *tensors)


class _PostBackward(torch.autograd.Function):
    """FSDP2's autograd node, with two differences.

    An unused tensor gets no gradient: zeros would reach the parameters that it was computed from, and weight decay and
    momentum would change them. Its outputs are no views, because views could not be written to in place.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(group: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # pyrefly: ignore[bad-override]
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.group = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        ctx.group.post_backward()
        return None, *gradients

    @staticmethod
    def jvp(ctx: Any, group: None, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:  # pyrefly: ignore[bad-override]
        return tangents


def edges_before(node: Any, output: int) -> list[tuple[Any, int]]:
    """The autograd nodes, each with an output index, that an output of a node was computed from."""
    edges = list(node.next_functions)
    # This node passes unrelated tensors through.
    return edges[output : output + 1] if node.name().endswith("PostBackwardBackward") else edges


@contextlib.contextmanager
def gradient_sync(model: nn.Module, *, reduce: bool, all_reduce: bool, is_last: bool) -> Iterator[None]:
    """Set FSDP2's accumulation switches in the whole tree inside the block."""
    before = [(module, *_switches(module)) for module in fsdp_modules(model)]
    try:
        for module, *_ in before:
            _switch(module, reduce, reduce and all_reduce, is_last)
        yield
    finally:
        for module, *switches in before:
            _switch(module, *switches)


def _switches(module: Any) -> tuple[bool, bool, bool]:
    """Whether a module's gradients are reduced, and over replicas too, and whether the next backward is the last."""
    is_last = fsdp_state(module)._state_ctx.is_last_backward
    return next(((g.reduce_grads, g.all_reduce_grads, is_last) for g in groups_of(module)), (True, True, is_last))


def _switch(module: Any, reduce: bool, all_reduce: bool, is_last: bool) -> None:
    module.set_requires_gradient_sync(reduce, recurse=False)
    module.set_requires_all_reduce(all_reduce, recurse=False)
    module.set_is_last_backward(is_last)


def clear_gradients(groups: Iterable[Any], modules: set[nn.Module], *, set_to_none: bool) -> None:
    """Clear the gradients of `modules`' parameters in groups: reduced, unreduced, and HSDP's partial sums."""
    for group in groups:
        cleared = {p for p in group.fsdp_params if any(module in modules for module, _ in fsdp.places_of(p))}
        for param in cleared:
            places = [(param.sharded_param, "grad"), *_unreduced(param)]
            for owner, name in places:
                gradient = getattr(owner, name)
                if gradient is not None and set_to_none:
                    setattr(owner, name, None)
                elif gradient is not None:
                    gradient.detach().zero_()
        covered = partial_sums(group)
        if not cleared.isdisjoint(covered):
            lay_out_partial_sums(group, [param for param in covered if param not in cleared])


def _unreduced(param: Any) -> list[tuple[Any, str]]:
    """Return the objects and attributes with a parameter's unreduced gradient."""
    places = [(param, "unsharded_accumulated_grad")] if "unsharded_accumulated_grad" in vars(param) else []
    unsharded = getattr(param, "_unsharded_param", None)
    return places if unsharded is None else [*places, (unsharded, "grad")]


def fill_unused_gradient(group: Any, fsdp_param: Any) -> bool | None:
    """Set a zero gradient on an unsharded, trainable parameter without one.

    Returns:
        Whether it was filled; None if not applicable: frozen, never unsharded, or not reduced now.
    """
    parameter = getattr(fsdp_param, "_unsharded_param", None)
    if parameter is None or not fsdp_param.sharded_param.requires_grad:
        return None
    if any(getattr(owner, name) is not None for owner, name in _unreduced(fsdp_param)):
        return False
    if not group.reduce_grads:
        return None
    parameter.grad = zero_gradient(parameter)
    return True


def set_reduce_dtype(group: Any, dtype: torch.dtype) -> None:
    """Set the reduce dtype of a group's gradients; complex ones keep theirs."""
    if not any(parameter.is_complex() for parameter in fsdp.sharded_parameters(group)):
        fsdp.change_policy(group, reduce_dtype=dtype)
        group._init_mp_dtypes()


_BY_PRECISION = ("mp_policy", "all_gather_outputs", "_unsharded_inner_tensors", "_unsharded_param")


def toggle_full_precision(group: Any) -> None:
    """Switch a group between its own policy and compute and reduction in the dtype of its shards."""
    fresh = {"mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
    fresh |= {"all_gather_outputs": [], "_unsharded_inner_tensors": []}
    fsdp.reshard_group(group)
    for owner in (group, *group.fsdp_params):
        current = {name: vars(owner).pop(name) for name in _BY_PRECISION if name in vars(owner)}
        other = vars(owner).pop("shardwise_other_precision", fresh)
        vars(owner).update({name: value for name, value in other.items() if name in current or other is not fresh})
        vars(owner)["shardwise_other_precision"] = current
    group._init_mp_dtypes()


def step_in_backward(groups: Iterable[Any]) -> None:
    """Step the optimizers that `_apply_optimizer_in_backward` attached to parameters; FSDP2 does not run its hooks."""
    for group in groups:
        for record in group.fsdp_params:
            optimizers = record.sharded_param.__dict__.get("_in_backward_optimizers", ())
            if optimizers and record.sharded_param.grad is not None:
                for optimizer in optimizers:
                    optimizer.step()
                record.sharded_param.grad = None


class LocalGradScaler(torch.amp.GradScaler):
    """A gradient scaler that unscales this rank's part of each gradient, also in float16, and then calls `agree`."""

    def agree(self, found_inf: torch.Tensor) -> None:
        """Hook for subclasses: reduce `found_inf` over all ranks in place."""

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
                if flag is not found_inf:
                    found_inf += flag.to(found_inf.device)
            self.agree(found_inf)  # once in total: ranks may have gradients on different devices
            for flag in found.values():
                flag.copy_(found_inf)
        return found


def unsharded_gradient_bytes(group: Any) -> int:
    """Return the bytes of unreduced, unsharded gradients."""
    waiting = [getattr(owner, name) for param in group.fsdp_params for owner, name in _unreduced(param)]
    return sum(gradient.nbytes for gradient in waiting if gradient is not None)


def has_fused_kernels(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether torch's fused optimizers support all parameters."""
    devices = _get_fused_kernels_supported_devices()
    return all(p.is_floating_point() and p.device.type in devices for p in parameters)


def set_supports_found_inf(optimizer: torch.optim.Optimizer, allowed: bool) -> None:
    """Mark an optimizer as supporting `set_found_inf`."""
    optimizer._step_supports_amp_scaling = allowed  # pyrefly: ignore[missing-attribute]


def set_found_inf(optimizer: torch.optim.Optimizer, is_bad: torch.Tensor) -> bool:
    """Skip the next step on the device if `is_bad` is 1; return False if unsupported."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):  # fused kernels read GradScaler's attributes
        return False
    optimizer.grad_scale, optimizer.found_inf = None, is_bad  # pyrefly: ignore[missing-attribute]
    return True
