"""The only folder that names private torch or compares torch versions; everything else sees these few functions."""

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from shardwise.compat.support import check_torch as check_torch

try:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices
    from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode
except ImportError:
    check_torch()  # says which of them are gone, and what to install
    raise

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def fsdp_state(module: nn.Module) -> Any:
    """FSDP2's own state of `module`, or None when `fully_shard` was not applied to it."""
    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


def fsdp_states(model: nn.Module) -> list[Any]:
    """Every FSDP2 state in the tree, once each (a state may serve several modules), root first."""
    states: dict[int, Any] = {}
    for module in model.modules():
        if (state := fsdp_state(module)) is not None:
            states.setdefault(id(state), state)
    return list(states.values())


def state_param_groups(state: Any) -> list[Any]:
    """The parameter groups of one FSDP2 state."""
    if hasattr(state, "_fsdp_param_groups"):  # torch >= 2.12: several per module
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def param_groups(model: nn.Module) -> list[Any]:
    """Every FSDP2 parameter group in the tree, root's first."""
    return [group for state in fsdp_states(model) for group in state_param_groups(state)]


def sharded_parameters(group: Any) -> Iterator[nn.Parameter]:
    """The DTensor parameters that a group shards, whatever is registered on the modules right now."""
    for fsdp_param in group.fsdp_params:
        yield fsdp_param.sharded_param


def unsharded_parameters(group: Any) -> Iterator[nn.Parameter]:
    """The gathered, plain parameters of a group that exist by now (they outlive their storage)."""
    for fsdp_param in group.fsdp_params:
        if (parameter := getattr(fsdp_param, "_unsharded_param", None)) is not None:
            yield parameter


def is_gathered(group: Any) -> bool:
    """Whether the group's plain parameters are registered on its modules now."""
    return not group.is_sharded


def reshard_group(group: Any) -> None:
    """Register the sharded parameters again and free the gathered ones."""
    group._to_sharded()


def take_over_hooks(module: nn.Module, hook_output: Callable[[Any], None]) -> None:
    """Remove the forward hooks that `fully_shard` put on a module; the caller runs them from its own.

    Args:
        module: A module of the group.
        hook_output: Called with each output of the group instead of FSDP2's own registration for backward.
    """

    def register(output: Any) -> Any:
        hook_output(output)
        return output

    state = fsdp_state(module)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    state._register_pre_backward_hook = register


def initialise(root: nn.Module) -> None:
    """Let the root take its groups under it, if no forward has done so yet: a part may be called first."""
    state = fsdp_state(root)
    if state._is_root is None:
        state._lazy_init()


def sequence_number() -> int:
    """Autograd's clock: operations recorded from now on have this number or a higher one."""
    return torch.autograd._get_sequence_nr()


def sequence_number_of(node: Any) -> int:
    """When autograd recorded a node, on the clock of `sequence_number`."""
    return node._sequence_nr()


def reduces_gradients(group: Any) -> bool:
    """Whether this backward's gradients become final: reduced over all ranks, replicas included."""
    return group.reduce_grads and group.all_reduce_grads


def _unseen_when_recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep gathering out of the list that selective activation checkpointing makes of a block's operators.

    The recomputation gathers the groups inside a block at other times than the first run did, and torch refuses
    a recomputation whose operators are not those of the list.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if isinstance(_get_current_dispatch_mode(), (_CachedTorchDispatchMode, _CachingTorchDispatchMode)):
            with _pop_mode_temporarily():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def _outside_inference_mode() -> Iterator[None]:
    """FSDP2 keeps the tensors it gathers into; made in inference mode, they could never be trained with later."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@_unseen_when_recomputed
def gather_group(group: Any) -> None:
    """Gather a group's parameters now and register them."""
    with _outside_inference_mode():
        group.unshard()
        group.wait_for_unshard()


def start_gather(group: Any) -> None:
    """Start gathering; the next forward waits for it. The modules keep their shards until then."""
    group.unshard(async_op=True)


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


def in_backward() -> bool:
    """Whether this thread is running a backward pass right now."""
    return torch._C._current_graph_task_id() != -1


def base_of_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that `tensor` is a view of, for autograd's purposes."""
    return tensor._base


@_unseen_when_recomputed
def enter_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Run FSDP2's pre-forward hook of `module` by hand."""
    with _outside_inference_mode():
        return fsdp_state(module)._pre_forward(module, args, kwargs)


@_unseen_when_recomputed
def leave_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Run FSDP2's post-forward hook of `module` by hand."""
    return fsdp_state(module)._post_forward(module, args, output)


def is_recomputing(module: nn.Module) -> bool:
    """Whether the forward of `module` now running is activation checkpointing's recomputation."""
    return fsdp_state(module)._training_state.name == "PRE_BACKWARD"


def replace_post_backward_hook(group: Any, register: Callable[[Any, Any, Any], tuple[Any, Any]]) -> None:
    """Let `register(group, args, kwargs)` hang the group's post-backward on the inputs of a call."""
    group._register_post_backward_hook = functools.partial(register, group)


def reduce_after_backward_of(group: Any, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors as seen through a node that runs the group's post-backward when their gradients are known."""
    return RegisterPostBackwardFunction.apply(group, *tensors)


def pre_backward(module: nn.Module) -> None:
    """Gather a module's parameters for backward, as FSDP2's hook on its output would."""
    fsdp_state(module)._pre_backward(torch.empty(0))


def on_backward_start(module: nn.Module, callback: Callable[[], None]) -> None:
    """Call `callback` before backward enters `module`, each time it does."""
    state = fsdp_state(module)
    pre_backward = state._pre_backward

    def call_then_enter(gradient: torch.Tensor) -> torch.Tensor:
        callback()
        return pre_backward(gradient)

    state._pre_backward = functools.wraps(pre_backward)(call_then_enter)


def on_backward_end(module: nn.Module, callback: Callable[[], None]) -> None:
    """Call `callback` after FSDP2 has finished each backward that entered `module`'s tree.

    FSDP2 queues the bound method of whichever state meets the backward first, so every state is given it.
    """
    for state in fsdp_states(module):
        finish = state._root_post_backward_final_callback

        def finish_then_call(finish: Callable[[], None] = finish) -> None:
            finish()
            callback()

        state._root_post_backward_final_callback = functools.wraps(finish)(finish_then_call)


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a tensor; also tells meta tensors apart, whose data pointer is 0."""
    return tensor.untyped_storage()._cdata


def is_settled(group: Any) -> bool:
    """Whether a group stands sharded with no gather on its way: nothing holds weights of before the step."""
    return group.is_sharded and group._all_gather_result is None


def settle(group: Any) -> None:
    """Finish a gather that is on its way, then free what was gathered and register the shards again."""
    group.wait_for_unshard()
    group._to_sharded()


def dtensor_like(local: torch.Tensor, parameter: DTensor) -> DTensor:
    """`local` as the part of a DTensor placed like `parameter`; unlike `from_local` it stays on its device."""
    meta = TensorMeta(parameter.shape, parameter.stride(), local.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def allocate_shard(fsdp_param: Any) -> torch.Tensor:
    """Give a sharded parameter on meta zeroed storage, padded and pinned as FSDP2 needs it; return it."""
    old = fsdp_param.sharded_param
    padded = torch.zeros(fsdp_param.padded_sharded_param_size, dtype=old.dtype, device=shard_device(fsdp_param))
    if fsdp_param.pin_memory:
        padded = padded.pin_memory()
    dim = fsdp_param.fsdp_placement.dim
    length = fsdp_param.sharded_size[dim] if fsdp_param.sharded_size.numel() else 0
    fsdp_param.sharded_param = replace_in_place(old, dtensor_like(padded.narrow(dim, 0, length), old))
    fsdp_param._sharded_param_data = padded.view(-1)
    return fsdp_param.sharded_param


def replace_in_place(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Give `old` the storage and device of `new`, so that every holder of `old` (ties, optimizers) sees it.

    Returns:
        `old`; or a new tensor that must be registered in its place, where torch cannot swap them.
    """
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)  # marks that a user set on the parameter
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:  # recurrent layers hold their weights weakly, a graph may hold them too
        return new
    return old


def is_aliased(tensor: torch.Tensor) -> bool:
    """Whether another tensor (a view, `.data`) holds the same storage."""
    # One count is the tensor's, one that of the storage object made here.
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2


def shard_device(fsdp_param: Any) -> torch.device:
    """Where the group keeps this parameter's shard: the CPU when offloading, else its compute device."""
    return torch.device("cpu") if fsdp_param.offload_to_cpu else fsdp_param.device


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


def states_under(root: Any) -> list[Any]:
    """The states that a root gathered under it at its first forward, itself included; else none."""
    return list(root._state_ctx.all_states) if root._is_root else []


def is_nested_state(state: Any) -> bool:
    """Whether a module further up is the FSDP2 root that this state works for."""
    return state._is_root is False


def is_root(state: Any) -> bool | None:
    """Whether the first forward found this state to be its model's root; None before that."""
    return state._is_root


def reset_iteration(state: Any) -> None:
    """Bring a root's tree back to where a forward can start: nothing in flight, everything sharded."""
    if state._is_root is None:  # no forward has run yet: there is nothing to reset but an early unshard()
        for group in state_param_groups(state):
            group._to_sharded()
    elif hasattr(state, "_reset_iter_state"):  # torch >= 2.13
        state._reset_iter_state()
    else:
        _reset_iteration_by_hand(state)


def _reset_iteration_by_hand(state: Any) -> None:
    idle = type(state._training_state).IDLE
    stream = state._device_handle.current_stream()
    comm = state._comm_ctx
    for pending in (comm.all_gather_state, comm.reduce_scatter_state):
        if pending is not None and pending.event is not None:
            stream.wait_event(pending.event)
    comm.all_gather_state = comm.reduce_scatter_state = None
    comm.post_forward_order.clear()
    for nested in state._state_ctx.all_states:
        nested._modules_to_run_forward.clear()
        nested._training_state = idle
        for group in state_param_groups(nested):
            group.finalize_backward()  # waits for the group's collectives and forgets them
            group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._training_state = idle
            group._to_sharded()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def was_left_midway(state: Any) -> bool:
    """Whether an earlier backward of this tree raised: its last callback is queued but can no longer run."""
    return state._state_ctx.post_backward_final_callback_queued and torch._C._current_graph_task_id() == -1


@contextlib.contextmanager
def untouched_by_fsdp(groups: Iterable[Any], refuse: Callable[..., NoReturn]) -> Iterator[None]:
    """Let other parameters stand for those of the groups: FSDP2 does not adopt them, and calls `refuse` to gather."""
    with contextlib.ExitStack() as stack:
        for group in groups:
            stack.enter_context(_shadowed(group, "unshard", refuse))
            for param in group.fsdp_params:
                stack.enter_context(_shadowed(param, "reset_sharded_param", lambda: None))
        yield


@contextlib.contextmanager
def _shadowed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an instance attribute over a method, and take it away again."""
    earlier = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        if earlier is not None:
            setattr(owner, name, earlier)


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


def compute_device(model: nn.Module) -> torch.device:
    """The device on which a sharded model computes."""
    return fsdp_state(model)._device


@contextmanager
def fake_tensor_mode() -> Iterator[Any]:
    """A context in which tensors have shapes and devices but no memory; real ones inside it count as fake."""
    from torch._subclasses import fake_tensor

    # An operator that fake tensors cannot follow is an answer, not something to print a traceback about.
    logger = fake_tensor.log
    disabled, logger.disabled = logger.disabled, True
    try:
        with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        logger.disabled = disabled


def watch_operators(seen: Callable[[str, list[torch.Tensor]], None]) -> Any:
    """A context that reports the name and the tensor arguments of every operator before it runs."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
            seen(func.overloadpacket.__name__, tensors)
            return func(*args, **(kwargs or {}))

    return Watch()


def all_gather_flat(output: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather equal parts into one flat tensor; torch 2.13 renamed it and warns about the old name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, part, group=group)


def reduce_scatter_flat(
    output: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM
) -> None:
    """Sum `whole` over the ranks and keep this rank's part of it."""
    if hasattr(dist, "reduce_scatter_single"):  # torch >= 2.13, where the old name warns
        dist.reduce_scatter_single(output, whole, op=op, group=group)
    else:
        dist.reduce_scatter_tensor(output, whole, op=op, group=group)


def axes_in_cutting_order(tensor: DTensor, dim: int) -> list[int]:
    """The mesh axes of a DTensor, those that cut `dim` in the order in which they do."""
    axes = list(range(tensor.device_mesh.ndim))
    for entry in getattr(tensor._spec, "shard_order", None) or ():
        if entry.tensor_dim == dim and list(entry.mesh_dims) != sorted(entry.mesh_dims):
            return list(entry.mesh_dims) + [axis for axis in axes if axis not in entry.mesh_dims]
    return axes


def split_rows(placement: Any, rows: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Row numbers as a placement that shards would divide them among `count` ranks, in its own manner."""
    strided = type(placement)(dim=0, split_factor=placement.split_factor) if _is_strided(placement) else Shard(0)
    return tuple(strided._split_tensor(rows, count, with_padding=False)[0])


def _is_strided(placement: Any) -> bool:
    return hasattr(placement, "split_factor")


def is_in_backward(group: Any) -> bool:
    """Whether a backward has entered the group and not left it."""
    return group._training_state.name == "PRE_BACKWARD"


def set_reduce_dtype(group: Any, dtype: torch.dtype) -> None:
    """Sum a group's gradients in another dtype from now on."""
    group.mp_policy = dataclasses.replace(group.mp_policy, reduce_dtype=dtype)
    group._init_mp_dtypes()


def private_policy(name: str) -> Any:
    """A wrapping policy of FSDP1 that scripts import although its name is private."""
    from torch.distributed.fsdp import wrap

    return getattr(wrap, name)


_private_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def private_gloo_group(purpose: str, timeout: timedelta) -> Any:
    """A gloo group of all ranks that torch does not know of, so that `destroy_process_group` leaves it alone.

    Every rank must make its private groups in the same order: the count of them is the name they meet under.
    """
    store = dist.distributed_c10d._get_default_store()
    count = _private_groups.setdefault(dist.group.WORLD, itertools.count())
    prefixed = dist.PrefixStore(f"{purpose}/{next(count)}", store)
    return dist.ProcessGroupGloo(prefixed, dist.get_rank(), dist.get_world_size(), timeout)


def broadcast_on(group: Any, tensor: torch.Tensor) -> None:
    """Overwrite `tensor` with rank 0's, on a group that torch does not know of."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([tensor], options).wait()


def gather_on(group: Any, tensor: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Fill `parts` on rank 0 with every rank's tensor, on a group that torch does not know of."""
    options = dist.GatherOptions()
    options.rootRank = 0
    group.gather([parts] if parts else [], [tensor], options).wait()


def largest_on(group: Any, tensor: torch.Tensor) -> None:
    """Overwrite each element of `tensor` with the largest that any rank has, on a group that torch does not know of."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    group.allreduce([tensor], options).wait()


def pin_host_memory(address: int, num_bytes: int) -> bool:
    """Let the GPU copy straight to this memory of ours; False where the driver refuses."""
    runtime: Any = torch.cuda.cudart()
    return int(runtime.cudaHostRegister(address, num_bytes, 0)) == 0


def unpin_host_memory(address: int) -> None:
    """Take that back, before the memory is given up."""
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)


def is_called_by_dcp() -> bool:
    """Whether what calls this, a method of `nn.Module` made anew, works for torch.distributed.checkpoint's helpers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != "torch.nn.modules.module" and not name.startswith("shardwise."):
            return name == "torch.distributed.checkpoint.state_dict"
        frame = frame.f_back
    return False


def default_comm_hooks() -> Any:
    """The module with the gradient hooks that torch ships for FSDP1."""
    from torch.distributed.algorithms._comm_hooks import default_hooks

    return default_hooks


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


def watch_collectives(
    group: Any,
    *,
    before: Callable[[bool, int, bool], None],
    failed: Callable[[Exception], None],
    waiting: Callable[[], None],
) -> Callable[[], None]:
    """Follow the gathers and reductions of a group.

    Args:
        group: An FSDP2 parameter group.
        before: Gets whether it is a reduction, the elements sent, and whether gradients are recorded. It may raise: the
            collective is then not started.
        failed: Called with what the collective raised; may raise something that says more.
        waiting: Called now and then while the CPU waits for the others; may raise. On GPUs the CPU does not wait here.

    Returns:
        A function that stops it.
    """
    unshard, with_gradient = group.unshard, False

    def note_then_unshard(async_op: bool = False) -> None:
        nonlocal with_gradient
        with_gradient = torch.is_grad_enabled()  # further down FSDP2 switches it off
        unshard(async_op)

    note_then_unshard.watched = unshard  # pyrefly: ignore[missing-attribute]

    def report(comm: Any, is_reduction: bool) -> Callable[[], None]:
        plain = type(comm)
        call = plain.__call__
        may_wait = group.device.type == "cpu"

        def start(self: Any, *args: Any, **kwargs: Any) -> Any:
            sent = kwargs["input_tensor"] if "input_tensor" in kwargs else args[1]
            before(is_reduction, sent.numel(), with_gradient)
            try:
                if may_wait and not args and not kwargs.get("async_op"):
                    return wait_in_slices(call(self, **kwargs | {"async_op": True}), kwargs["group"], waiting)
                return call(self, *args, **kwargs)
            except Exception as error:
                failed(error)
                raise

        # A subclass, since FSDP2 asks for the class when its own settings change it.
        comm.__class__ = type(plain.__name__, (plain,), {"__call__": start})
        return functools.partial(setattr, comm, "__class__", plain)

    group.unshard = note_then_unshard
    undo = [report(group._all_gather_comm, False), report(group._reduce_scatter_comm, True)]
    watched = weakref.ref(group)  # whoever keeps what we return must not keep the model

    def stop() -> None:
        for restore in undo:
            restore()
        if (group := watched()) is not None and hasattr(group.unshard, "watched"):
            group.unshard = group.unshard.watched  # unless something else was put around it since

    return stop


_SLICE = timedelta(seconds=0.25)


def wait_in_slices(work: Any, process_group: Any, waiting: Callable[[], None]) -> None:
    """Wait for a collective, and let `waiting` end the wait by raising."""
    while work is not None:
        try:
            work.wait(_SLICE)
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises if it failed; it may also have ended between the two
                return
        try:
            waiting()
        except Exception:
            # Destroying the group would wait for the collective, which may never end: leave it to the process's end.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))
            raise


def aborter(groups: Iterable[Any]) -> Callable[[], None]:
    """A function, for any thread, that ends the collectives of the groups where the backend can (NCCL)."""
    infos = [group.mesh_info for group in groups if group.device.type != "cpu"]
    names = ("shard_process_group", "reduce_scatter_process_group", "replicate_process_group")
    found = [getattr(info, name, None) for info in infos for name in names]
    process_groups = list({id(each): each for each in found if each is not None}.values())

    def abort() -> None:
        for process_group in process_groups:
            process_group.abort()

    return abort


def store_connector(prefix: str) -> Callable[[], Any]:
    """A function that opens a connection of its own to the store that all ranks met at."""
    store: Any = dist.distributed_c10d._get_default_store()

    def connect() -> Any:
        own = store.clone()  # a connection serves one thread at a time, and others wait in theirs for minutes
        own.set_timeout(timedelta(seconds=30))
        return dist.PrefixStore(prefix, own)

    return connect


def fsdp1_flat_params(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """FSDP1's flat parameters in a wrapped model, each with the name of the module that was wrapped."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield name, module._handle.flat_param


def flat_param_entries(flat_param: Any) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name (in its wrapped module), shape and first element of each parameter in a flat one of FSDP1."""
    names = iter(zip(flat_param._fqns, flat_param._shapes, strict=True))
    start = 0
    for numel, is_padding in zip(flat_param._numels_with_padding, flat_param._is_padding_mask, strict=True):
        if not is_padding:
            name, shape = next(names)
            yield name, tuple(shape), start
        start += numel


def flat_param_ties(flat_param: Any) -> Iterator[tuple[str, str]]:
    """Further names of parameters in a flat one of FSDP1, each with the name it is stored under."""
    for info in flat_param._shared_param_infos:
        also, stored = (info.module_name, info.param_name), (info.prim_module_name, info.prim_param_name)
        yield ".".join(filter(None, also)), ".".join(filter(None, stored))


def flat_param_numel(flat_param: Any) -> int:
    """Elements of all ranks' parts of a flat parameter of FSDP1, without the padding of the last rank."""
    return flat_param._unpadded_unsharded_size.numel()


def places_in_group(group: Any) -> Iterator[tuple[Any, nn.Module, str]]:
    """Each parameter record of a group with the module that registers it and the name there."""
    for fsdp_param in group.fsdp_params:
        yield fsdp_param, fsdp_param._module_info.module, fsdp_param._module_info.param_name


def registered_parameter(fsdp_param: Any) -> nn.Parameter | None:
    """What stands on the module in a parameter's place now."""
    info = fsdp_param._module_info
    return info.module._parameters.get(info.param_name)


def real_and_padded_numel(fsdp_param: Any) -> tuple[int, int]:
    """Elements of a parameter, and elements that all ranks of its shard axis hold of it, padding included."""
    real = fsdp_param._orig_size.numel()
    padded = fsdp_param.padded_sharded_param_size.numel() * fsdp_param.mesh_info.shard_mesh_size
    return real, padded


def watch_data_assignment(assign: Callable[[DTensor, torch.Tensor], bool]) -> None:
    """Ask `assign(tensor, value)` at each `tensor.data = value` on a DTensor; torch goes on where it returns False.

    torch changes only the wrapper's metadata then: the local tensor, which is what trains, stays as it was.
    """
    plain: Any = torch._C.TensorBase.data  # the descriptor, not a tensor

    def set_data(self: DTensor, value: torch.Tensor) -> None:
        if not assign(self, value):
            plain.__set__(self, value)

    get_and_set: Any = property(lambda self: plain.__get__(self), set_data)
    setattr(DTensor, "data", get_and_set)  # noqa: B010 - type checkers know it as an attribute of instances


def flight_record() -> bytes | None:
    """The pickle of torch's flight recorder on this rank; None where it is off or empty."""
    extension = torch._C._distributed_c10d
    dump = getattr(extension, "_dump_fr_trace", None) or getattr(extension, "_dump_nccl_trace", None)
    return dump() if dump is not None else None


def collective_numels(group: Any) -> tuple[int, int]:
    """Elements that a rank sends when a group is gathered, and when its gradients are reduced."""
    gathered = sum(fsdp_param.padded_sharded_param_size.numel() for fsdp_param in group.fsdp_params)
    return gathered, gathered * group.fsdp_params[0].mesh_info.shard_mesh_size if group.fsdp_params else 0


def named_groups(model: nn.Module) -> dict[str, Any]:
    """FSDP2's groups by the module they stand for, in the order of the modules."""
    groups: dict[str, Any] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        state = fsdp_state(module)
        for number, group in enumerate([] if state is None else state_param_groups(state)):
            if id(group) not in seen:
                seen.add(id(group))
                groups[(name or "(root)") + (f" [{number}]" if number else "")] = group
    return groups


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


def watched_agent(watch: Callable[[dict[int, Any]], None], **settings: Any) -> Any:
    """Torch's elastic agent of local processes, which shows them to `watch` at each look that it takes at them.

    Args:
        watch: Called with the processes by rank; what it raises ends the agent.
        settings: Of `LocalElasticAgent`, whose entry point is a function.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class WatchedAgent(LocalElasticAgent):
        def _monitor_workers(self, worker_group: Any) -> Any:
            context: Any = self._pcontext
            processes = context._pc.processes
            watch({worker.global_rank: processes[worker.local_rank] for worker in worker_group.workers})
            return super()._monitor_workers(worker_group)

    return WatchedAgent(**settings)


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


class CollectiveTap:
    """Calls `before` ahead of each gather and reduction of an FSDP2 group, while it is open; it may raise.

    It stands outside of whatever else watches the group at the time, and must be shut before that is.

    Args:
        group: An FSDP2 parameter group.
        before: Gets whether it is a reduction, what is sent, and the process group.
    """

    def __init__(self, group: Any, before: Callable[[bool, torch.Tensor, Any], None]) -> None:
        self._group, self._before = group, before
        self._tapped: dict[tuple[type, bool], type] = {}
        self._plain: list[tuple[Any, type]] = []

    def open(self) -> None:
        """Begin to listen."""
        for comm, is_reduction in ((self._group._all_gather_comm, False), (self._group._reduce_scatter_comm, True)):
            plain = type(comm)
            tapped = self._tapped.get((plain, is_reduction)) or self._make(plain, is_reduction)
            self._plain.append((comm, plain))
            comm.__class__ = tapped

    def shut(self) -> None:
        """Leave the group as it was."""
        while self._plain:
            comm, plain = self._plain.pop()
            comm.__class__ = plain

    def _make(self, plain: type, is_reduction: bool) -> type:
        before, call = self._before, plain.__call__

        def start(comm: Any, *args: Any, **kwargs: Any) -> Any:
            sent = kwargs["input_tensor"] if "input_tensor" in kwargs else args[1]
            before(is_reduction, sent, kwargs["group"] if "group" in kwargs else args[2])
            return call(comm, *args, **kwargs)

        # A subclass, since FSDP2 asks for the class when its own settings change it.
        tapped = type(plain.__name__, (plain,), {"__call__": start})
        self._tapped[plain, is_reduction] = tapped
        return tapped


def gathers_among_fewer(group: Any, process_group: Any) -> bool:
    """Whether it is the smaller group in which `reshard_after_forward=N` gathers for backward."""
    return process_group is not group.mesh_info.shard_process_group


def is_reduced_over_replicas(group: Any) -> bool:
    """Whether a reduction of this group goes on, right after, with a sum over replicas."""
    return bool(group._is_hsdp and group.all_reduce_grads)


def num_shards(group: Any) -> int:
    """Among how many ranks a group's parameters are cut; FSDP2 gathers nothing where it is 1."""
    return getattr(group.mesh_info, "shard_mesh_size", 1)


def is_data_parallel(group: Any) -> bool:
    """Whether nothing but FSDP2 cuts a group's parameters: no tensor parallelism, which communicates in between."""
    num_axes = group.mesh_info.mesh.ndim
    return all(isinstance(p, DTensor) and p.device_mesh.ndim == num_axes for p in sharded_parameters(group))


def join_gather(group: Any, num_elements: int, dtype: torch.dtype, *, among_fewer: bool) -> None:
    """Take part in a gather of the others, with zeros, and forget what comes."""
    info = group.post_forward_mesh_info if among_fewer else group.mesh_info
    sent = torch.zeros(num_elements, dtype=dtype, device=group.device)
    process_group = info.shard_process_group
    all_gather_flat(sent.new_empty(num_elements * process_group.size()), sent, process_group)


def join_reduction(group: Any, num_elements: int, dtype: torch.dtype, *, over_replicas: bool) -> None:
    """Take part in a reduction of the others, with zeros, and forget what comes."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    shards, replicas = group._reduce_scatter_process_group, group._all_reduce_process_group if group._is_hsdp else None
    # The same operation as the others: a backend may choose its algorithm by it.
    *_, scatter_op, reduce_op = _get_gradient_divide_factors(
        shards, replicas, dtype, group.device.type, group.gradient_divide_factor, group.force_sum_reduction_for_comms
    )
    sent = torch.zeros(num_elements, dtype=dtype, device=group.device)
    part = sent.new_empty(num_elements // shards.size())
    reduce_scatter_flat(part, sent, shards, scatter_op)
    if over_replicas:
        dist.all_reduce(part, op=reduce_op, group=replicas)
