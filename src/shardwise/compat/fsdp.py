"""FSDP2's states and parameter groups: find them, unshard and reshard them, run their hooks."""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode


def fsdp_state(module: nn.Module) -> Any:
    """FSDP2's state of `module`, or None if `fully_shard` was not applied to it."""
    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules of the tree with `fully_shard` applied, root first; of several in one call, only the first."""
    first: dict[int, Any] = {}
    for module in model.modules():
        if (state := fsdp_state(module)) is not None:
            first.setdefault(id(state), module)
    return list(first.values())


def groups_of(module: nn.Module) -> list[Any]:
    """The parameter groups of one application of `fully_shard`; empty if it was not applied."""
    state = fsdp_state(module)
    return [] if state is None else _groups_of(state)


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):  # torch >= 2.12: several per module
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


SPLITS_GROUPS = isinstance(getattr(FSDPState, "_fsdp_param_group", None), property)
"""Whether a module can have several parameter groups (torch >= 2.12)."""


def set_complex_apart(module: nn.Module) -> None:
    """Move the complex parameters of a newly sharded module to a separate group, in their storage dtype.

    FSDP2 reduces the gradients of a group in one buffer of one dtype.
    """
    state = fsdp_state(module)
    (group,) = state._fsdp_param_groups
    other = copy.copy(group)
    for name, value in vars(group).items():
        if isinstance(value, (dict, list)) or name in ("_all_gather_comm", "_reduce_scatter_comm"):
            setattr(other, name, copy.copy(value))
    other.fsdp_params = [param for param in group.fsdp_params if param.sharded_param.is_complex()]
    group.fsdp_params = [param for param in group.fsdp_params if not param.sharded_param.is_complex()]
    change_policy(other, param_dtype=None, reduce_dtype=None)
    state._fsdp_param_groups.append(other)


def change_policy(group: Any, **dtypes: torch.dtype | None) -> None:
    """Set dtypes of a group's mixed-precision policy."""
    for owner in (group, *group.fsdp_params):  # torch 2.15 has a policy for each parameter
        if hasattr(owner, "mp_policy"):
            owner.mp_policy = dataclasses.replace(owner.mp_policy, **dtypes)


def param_groups(model: nn.Module) -> list[Any]:
    """Every FSDP2 parameter group in the tree, root's first."""
    return [group for module in fsdp_modules(model) for group in groups_of(module)]


def parameter_records(groups: Iterable[Any]) -> list[Any]:
    """FSDP2's record of each parameter that the groups shard."""
    return [fsdp_param for group in groups for fsdp_param in group.fsdp_params]


def extension_of(parameter: torch.Tensor) -> Any:
    """The local tensor of a sharded parameter if it defines its own all-gather (`fsdp_pre_all_gather`), else None."""
    local = getattr(parameter, "_local_tensor", None)
    return local if hasattr(local, "fsdp_pre_all_gather") else None


class _GatherBytes:
    """A group's all-gather as bytes: gloo does not support float8, which a group may be all-gathered in."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any) -> Any:
        tensors = {"output_tensor": output_tensor, "input_tensor": input_tensor}
        return self.comm(**{name: tensor.view(torch.uint8) for name, tensor in tensors.items()}, **options)


def gather_bytes(model: nn.Module) -> None:
    """Make the groups of the tree all-gather their parameters as bytes."""
    for group in param_groups(model):
        group._all_gather_comm = _GatherBytes(group._all_gather_comm)


def drop_records(group: Any, is_dropped: Callable[[Any], bool]) -> None:
    """Remove parameters from a group, which must currently be sharded."""
    for fsdp_param in filter(is_dropped, group.fsdp_params):
        fsdp_param._post_load_hook_handle.remove()
    group.fsdp_params = [fsdp_param for fsdp_param in group.fsdp_params if not is_dropped(fsdp_param)]


def sharded_parameter(fsdp_param: Any) -> nn.Parameter:
    """The DTensor parameter of a record."""
    return fsdp_param.sharded_param


def sharded_parameters(group: Any) -> Iterator[nn.Parameter]:
    """The DTensor parameters of a group, even if others are currently registered on the modules."""
    for fsdp_param in group.fsdp_params:
        yield fsdp_param.sharded_param


def unsharded_parameters(group: Any) -> Iterator[nn.Parameter]:
    """The existing unsharded parameters of a group; they exist also while their storage is freed."""
    for fsdp_param in group.fsdp_params:
        if (parameter := getattr(fsdp_param, "_unsharded_param", None)) is not None:
            yield parameter


def is_unsharded(group: Any) -> bool:
    """Whether the group's unsharded parameters are currently registered on its modules."""
    return not group.is_sharded


def reshard_group(group: Any) -> None:
    """Register the sharded parameters again and free the unsharded ones."""
    group._to_sharded()


def around_method(
    owner: Any, name: str, *, before: Callable[[], Any] | None = None, after: Callable[[], Any] | None = None
) -> None:
    """Call `before` ahead of a method of one object, and `after` once it has returned."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        result = method(*args, **kwargs)
        if after is not None:
            after()
        return result

    setattr(owner, name, call)


def around_unsharded(
    group: Any,
    before_unshard: Callable[[Any], None],
    after_unshard: Callable[[Any], None],
    before_reshard: Callable[[Any], None],
) -> None:
    """Call functions with the group when its parameters are unsharded and resharded.

    `before_unshard` is called while the shards are registered on the modules, `after_unshard` once the unsharded
    parameters are registered, `before_reshard` before they are freed.
    """

    def waited() -> None:
        if vars(group).pop(_SHOWS_SHARDS, False):
            before_unshard(group)
            for fsdp_param in group.fsdp_params:
                fsdp_param.to_unsharded()

    def unshards() -> None:
        vars(group).pop(_SHOWS_SHARDS, None)
        if group.is_sharded:
            before_unshard(group)

    def reshards() -> None:
        vars(group).pop(_SHOWS_SHARDS, None)
        if not (group.is_sharded or group.is_sharded_post_forward):
            before_reshard(group)

    around_method(group, "wait_for_unshard", after=waited)
    around_method(group, "_to_unsharded", before=unshards, after=functools.partial(after_unshard, group))
    around_method(group, "_to_sharded", before=reshards)
    around_method(group, "_to_sharded_post_forward", before=reshards)


_SHOWS_SHARDS = "shardwise_shows_shards"


def show_shards(group: Any) -> None:
    """Register the shards on the modules until the next wait for unsharding; the unsharded parameters are not freed."""
    vars(group)[_SHOWS_SHARDS] = True
    for fsdp_param in group.fsdp_params:
        fsdp_param._setattr_on_modules(fsdp_param.sharded_param)


def before_reset(group: Any, check: Callable[[Any], None]) -> None:
    """Call `check(record)` before FSDP2 adopts the registered parameter as the shard, as in the first forward."""
    for record in group.fsdp_params:
        around_method(record, "reset_sharded_param", before=functools.partial(check, record))


def keep_unsharded(groups: Iterable[Any]) -> Callable[[], None]:
    """Disable resharding of groups until the returned function is called."""
    kept = [group for group in groups if "reshard" not in vars(group)]
    for group in kept:
        group.reshard = lambda: None

    def restore() -> None:
        for group in kept:
            vars(group).pop("reshard", None)

    return restore


def wait_before_unshard(group: Any) -> None:
    """Let the next all-gather of a group wait for pending writes of the current stream to its shards."""
    if group.device.type != "cpu":
        group.comm_ctx.all_gather_copy_in_stream.wait_stream(group.device_handle.current_stream())


def wait_for_reduced_gradients(groups: Iterable[Any]) -> None:
    """Let the current stream wait for pending gradient reductions."""
    for group in groups:
        if group.device.type != "cpu":
            for stream in (group.comm_ctx.reduce_scatter_stream, group.comm_ctx.all_reduce_stream):
                group.device_handle.current_stream().wait_stream(stream)


def take_over_hooks(module: nn.Module, hook_output: Callable[[Any], None]) -> None:
    """Remove the forward hooks that `fully_shard` registered on a module; the caller must run them in its own hooks.

    Args:
        module: A module of the group.
        hook_output: Called with each output of the group, instead of FSDP2's registration of backward hooks.
    """

    def register(output: Any) -> Any:
        hook_output(output)
        return output

    state = fsdp_state(module)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    state._register_pre_backward_hook = register


def initialise(root: nn.Module) -> None:
    """Run FSDP2's lazy initialization from the root, unless done, because a submodule may be called first."""
    if is_root(root) is None:
        fsdp_state(root)._lazy_init()


def _unseen_when_recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hide all-gathers from the operator list that selective activation checkpointing records of a block.

    The recomputation unshards the groups inside a block at other times than the first run, and torch raises if the
    operators of a recomputation differ from the list.
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
    """Leave inference mode inside the block: FSDP2 keeps unsharded parameters, and inference tensors cannot train."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@_unseen_when_recomputed
def unshard_group(group: Any) -> None:
    """Unshard a group's parameters now and register them."""
    with _outside_inference_mode():
        group.unshard()
        group.wait_for_unshard()


@_unseen_when_recomputed
def enter_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Run FSDP2's pre-forward hook of `module` by hand."""
    if is_recomputing(module):
        for group in groups_of(module):
            # Gradients of another call are already reduced; those of this call must be reduced when backward ends.
            group._training_state = type(group._training_state).PRE_BACKWARD
    with _outside_inference_mode():
        return fsdp_state(module)._pre_forward(module, args, kwargs)


@_unseen_when_recomputed
def leave_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Run FSDP2's post-forward hook of `module` by hand."""
    return fsdp_state(module)._post_forward(module, args, output)


def is_recomputing(module: nn.Module) -> bool:
    """Whether the current forward of `module` is a recomputation by activation checkpointing."""
    return fsdp_state(module)._training_state.name == "PRE_BACKWARD"


def pre_backward(module: nn.Module) -> None:
    """Unshard a module's parameters for backward, as FSDP2's hook on its output would."""
    fsdp_state(module)._pre_backward(torch.empty(0))


def on_backward_start(module: nn.Module, callback: Callable[[], None]) -> None:
    """Call `callback` before backward enters `module`, each time it does."""
    around_method(fsdp_state(module), "_pre_backward", before=callback)


def on_backward_end(module: nn.Module, callback: Callable[[], None]) -> None:
    """Call `callback` after FSDP2 has finished each backward that entered `module`'s tree.

    FSDP2 queues the bound method of the first state that backward reaches, so all states are patched.
    """
    for state in map(fsdp_state, fsdp_modules(module)):
        around_method(state, "_root_post_backward_final_callback", after=callback)


def is_resharded(group: Any) -> bool:
    """Whether a group is sharded with no all-gather in flight, so that no copy of older weights exists."""
    return group.is_sharded and group._all_gather_result is None


def wait_and_reshard(group: Any) -> None:
    """Wait for an all-gather in flight, then free the unsharded parameters and register the shards again."""
    group.wait_for_unshard()
    group._to_sharded()


def is_root(module: nn.Module) -> bool | None:
    """Whether FSDP2 treats this module as the root; None before lazy initialization."""
    return fsdp_state(module)._is_root


def reset_iteration(root: Any) -> None:
    """Reset a root's tree for a new forward: no pending all-gathers, everything sharded; gradients are kept."""
    partial = [(group, group._partial_reduce_output) for group in param_groups(root)]
    if is_root(root) is None:  # before the first forward only an early unshard() needs a reset
        for group in groups_of(root):
            group._to_sharded()
    elif hasattr(root, "reset_iter_state"):  # torch >= 2.13
        root.reset_iter_state()
    else:
        _reset_iteration_by_hand(fsdp_state(root))
    for group, reduced in partial:  # HSDP's partial sums, not yet reduced over the replicas
        group._partial_reduce_output = reduced


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
        for group in _groups_of(nested):
            group.finalize_backward()  # waits for the group's collectives and drops them
            group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._training_state = idle
            group._to_sharded()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def is_running_backward(module: nn.Module) -> bool:
    """Whether a backward of this module's tree has begun and not ended."""
    return fsdp_state(module)._state_ctx.post_backward_final_callback_queued and not was_left_midway(module)


def was_left_midway(module: nn.Module) -> bool:
    """Whether an earlier backward of this tree raised: its final callback is queued but will not run."""
    is_queued = fsdp_state(module)._state_ctx.post_backward_final_callback_queued
    return is_queued and torch._C._current_graph_task_id() == -1


@contextlib.contextmanager
def untouched_by_fsdp(groups: Iterable[Any], refuse: Callable[..., NoReturn]) -> Iterator[None]:
    """Allow other parameters to be registered for those of the groups: FSDP2 does not adopt them, and unsharding calls
    `refuse`."""
    with contextlib.ExitStack() as stack:
        for group in groups:
            stack.enter_context(_shadowed(group, "unshard", refuse))
            for param in group.fsdp_params:
                stack.enter_context(_shadowed(param, "reset_sharded_param", lambda: None))
        yield


@contextlib.contextmanager
def _shadowed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Shadow a method by an instance attribute inside the block."""
    earlier = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
        if earlier is not None:
            setattr(owner, name, earlier)


def compute_device(model: nn.Module) -> torch.device:
    """The device on which a sharded model computes."""
    return fsdp_state(model)._device


def is_in_backward(group: Any) -> bool:
    """Whether a backward has entered the group and not left it."""
    return group._training_state.name == "PRE_BACKWARD"


def places_of(fsdp_param: Any) -> list[tuple[nn.Module, str]]:
    """The modules that register a parameter, and its name in each; several if it is tied."""
    info = fsdp_param._module_info
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]


def devices_of(fsdp_param: Any) -> tuple[torch.device, torch.device]:
    """The device of a parameter's shard, which is the CPU when offloading, and the compute device."""
    return torch.device("cpu") if fsdp_param.offload_to_cpu else fsdp_param.device, fsdp_param.device


def adopt_shard(fsdp_param: Any) -> None:
    """Let FSDP2 adopt the registered parameter as the shard, padded and pinned as needed."""
    fsdp_param.reset_sharded_param()


def real_and_padded_numel(fsdp_param: Any) -> tuple[int, int]:
    """Number of elements of a parameter, without and with the padding on all ranks of its shard axis."""
    real = fsdp_param._orig_size.numel()
    padded = fsdp_param.padded_sharded_param_size.numel() * fsdp_param.mesh_info.shard_mesh_size
    return real, padded


def named_groups(model: nn.Module) -> dict[str, Any]:
    """FSDP2's groups by module name, in the order of the modules."""
    names = {module: name or "(root)" for name, module in model.named_modules()}
    return {
        names[module] + (f" [{number}]" if number else ""): group
        for module in fsdp_modules(model)
        for number, group in enumerate(groups_of(module))
    }
