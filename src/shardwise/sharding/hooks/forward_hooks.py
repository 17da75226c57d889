"""Forward hooks of a sharded module: cast inputs, unshard parameters, register outputs for backward."""

import dataclasses
import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardwise import compat
from shardwise.models.nested_tensors import CastArguments, cast_floating, change_tensors, find_tensors
from shardwise.sharding.hooks.error_notes import annotate
from shardwise.sharding.hooks.graph_calls import GroupCall, graph_calls
from shardwise.sharding.hooks.outside import OutsideUse
from shardwise.sharding.hooks.parameter_writes import LocalValue, is_of_group, keep_assigned
from shardwise.sharding.registry import abandon_pass, recover


@dataclasses.dataclass(frozen=True, slots=True)
class Casts:
    """Casts of a group's inputs and outputs, the same in all torch versions.

    FSDP2's own casts differ: before 2.13 they are skipped during recomputation.
    """

    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None


class CallOfGroup:
    """One call of a module of a group, from the cast of its inputs to the hooks on its outputs."""

    def __init__(self, module: nn.Module, casts: Casts) -> None:
        self.module, self.casts = module, casts
        self._arguments = CastArguments()
        self._graph_call: GroupCall | None = None

    def enter(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Begin the call; return the arguments in the group's compute dtype."""
        self._graph_call = graph_calls().enter(self.module)
        self._arguments = CastArguments()
        if self.casts.input_dtype is not None:
            args, kwargs = self._arguments.cast_floating((args, kwargs), self.casts.input_dtype)
        return args, kwargs

    def register_post_backward(self, group: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Reduce the group's gradients once the gradients of these inputs are computed."""
        if not torch.is_grad_enabled():
            return args, kwargs
        tensors = [tensor for tensor in find_tensors((args, kwargs)) if tensor.requires_grad]
        if not tensors:
            return args, kwargs
        replaced = dict(zip(map(id, tensors), compat.reduce_after_backward_of(group, tensors), strict=False))
        return self._arguments.change_tensors((args, kwargs), lambda tensor: replaced.get(id(tensor), tensor))

    def unshard_before_backward(self, output: Any) -> None:
        """Unshard the group again before backward of the operations that computed `output`.

        FSDP2 hooks output tensors. An in-place operation on a returned view replaces the hooked tensor in the graph, so
        for a view the hook is on the operation that computed its base.
        """
        call = self._graph_call
        nodes: list[Any] = []
        for tensor in differentiable(output):
            base = compat.base_of_view(tensor)
            maker = None if base is None else base.grad_fn
            # A view of an older tensor is an input passed through: backward reaches its base long after the group.
            if maker is not None and call is not None and compat.sequence_number_of(maker) >= call.since:
                maker.register_prehook(self._unshard)
                nodes.append(maker)
            else:
                tensor.register_hook(self._unshard)
                nodes.append(tensor.grad_fn)
        graph_calls().close(call, [node for node in nodes if node is not None])

    @property
    def is_recorded(self) -> bool:
        """Whether autograd has recorded anything since the call began, so that a backward may follow."""
        if self._graph_call is None:
            return torch.is_grad_enabled() or compat.in_backward()
        return compat.sequence_number() > self._graph_call.since

    def leave(self, output: Any) -> Any:
        """End the call; return the output in the group's output dtype."""
        self._arguments.write_back()
        graph_calls().close(self._graph_call, ())  # no hooks are needed
        self._graph_call = None
        return output if self.casts.output_dtype is None else cast_floating(output, self.casts.output_dtype)

    def fail(self) -> None:
        """End the call after an exception."""
        graph_calls().abandon(self._graph_call)
        self._arguments, self._graph_call = CastArguments(), None

    def _unshard(self, *_: Any) -> None:
        compat.pre_backward(self.module)


def without_parameters(output: Any) -> Any:
    """Return the output with copies of parameters and views of parameters, which are freed now."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        base = compat.base_of_view(tensor)
        return tensor.clone() if is_of_group(tensor if base is None else base) else tensor

    return change_tensors(output, copied)


def differentiable(output: Any) -> list[torch.Tensor]:
    """Return the tensors of an output that backward can start from, including those in plain objects."""
    if not torch.is_grad_enabled():
        return []
    return [tensor for tensor in find_tensors(output, objects=1) if tensor.requires_grad]


class PartsForwardHooks:
    """Runs FSDP2's hooks for a group of modules.

    FSDP2's own hooks use only the last module's output. If the loss depends on an earlier module's output but not on
    that one (the keys of a prefix whose own result is dropped), backward would use freed parameters. Here the output of
    every module unshards the group again.
    """

    def __init__(self, modules: Sequence[nn.Module], root: nn.Module, casts: Casts) -> None:
        self.root = root
        self._first, self._calls = modules[0], {module: CallOfGroup(modules[0], casts) for module in modules}
        self._current = self._calls[self._first]
        self._waiting: set[nn.Module] = set()
        compat.take_over_hooks(self._first, lambda output: self._current.unshard_before_backward(output))
        for group in compat.groups_of(self._first):
            compat.replace_post_backward_hook(group, lambda *given: self._current.register_post_backward(*given))
        for module in modules:
            module.register_forward_pre_hook(torch.compiler.disable(self._enter), prepend=True, with_kwargs=True)
            module.register_forward_hook(torch.compiler.disable(self._leave))

    def finish(self) -> None:
        """Reshard the group even if not all its modules were called in this pass."""
        if self._waiting:
            self._waiting.clear()
            compat.leave_forward(self._first, (), None)

    def forget(self) -> None:
        """Reset after an exception."""
        self._waiting.clear()
        for call in self._calls.values():
            call.fail()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        compat.initialise(self.root)
        self._current = self._calls[module]
        args, kwargs = self._current.enter(args, kwargs)
        if self._waiting and not compat.is_recomputing(module):
            for group in compat.groups_of(module):
                compat.unshard_group(group)
            return args, kwargs
        if not compat.is_recomputing(module):
            self._waiting.update(self._calls)
        return compat.enter_forward(module, args, kwargs)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._current = self._calls[module]
        is_recomputing, output = compat.is_recomputing(module), without_parameters(output)
        if not is_recomputing:
            self._waiting.discard(module)
        if is_recomputing or not self._waiting:
            output = compat.leave_forward(module, args, output)
        else:
            self._current.unshard_before_backward(output)
        return self._current.leave(output)


class Replicated:
    """The replicated parameters of one model, and the modules that use them."""

    def __init__(self) -> None:
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []

    def __bool__(self) -> bool:
        return bool(self._places)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the tensors registered now."""
        return (module._parameters.get(name) for module, name, _ in self._places)

    def add(self, places: Iterable[tuple[nn.Module, str]], mesh: DeviceMesh, device: torch.device) -> nn.Parameter:
        """Turn the parameter registered at `places` into a replicated DTensor, under all its names."""
        places = list(places)
        module, name = places[0]
        old = module._parameters[name]
        assert old is not None
        local = old.detach() if old.is_meta else old.detach().to(device)
        spread = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
        new = nn.Parameter(spread, requires_grad=old.requires_grad)
        for module, name in places:
            module._parameters[name] = new
            self._places.append((module, name, new))
        return new

    def expose_local(self) -> None:
        """Expose plain tensors to all modules; gradients flow through them to the DTensors."""
        locals_: dict[int, torch.Tensor] = {}
        for module, name, parameter in self._places:
            registered = module._parameters.get(name, parameter)
            if id(registered) not in locals_:
                assert registered is not None
                is_spread = isinstance(registered, DTensor)  # plain in full_params
                locals_[id(registered)] = LocalValue.apply(registered) if is_spread else registered
            # Instance attributes take precedence over nn.Module's parameter lookup.
            module.__dict__[name] = locals_[id(registered)]

    def expose_local_again(self) -> None:
        """Expose plain tensors to recomputation in backward; they require gradients, as in the first run."""
        with torch.enable_grad():
            self.expose_local()

    def restore(self) -> None:
        """Expose the DTensors to all modules again."""
        for module, name, parameter in self._places:
            shown, registered = module.__dict__.pop(name, None), module._parameters.get(name, parameter)
            if shown is not None and isinstance(registered, DTensor):
                keep_assigned(shown, registered)


class ForwardHooks:
    """Counts nested calls of one group, so that FSDP2's hooks run once per outermost call.

    Otherwise a `forward` that calls a registered method enters the hooks twice: on torch 2.5 backward then fails, and
    on all versions the inner exit frees parameters that the outer call still needs.
    """

    def __init__(self, module: nn.Module, root: nn.Module, casts: Casts) -> None:
        self.module, self.root, self.depth = module, root, 0
        self._call = CallOfGroup(module, casts)
        self._handled: BaseException | None = None  # the exception that the caller is handling
        compat.take_over_hooks(module, self._call.unshard_before_backward)
        for group in compat.groups_of(module):
            compat.replace_post_backward_hook(group, self._call.register_post_backward)
        self.add_module(module)

    def after(self, output: Any) -> None:
        """Called after the outermost call returns."""

    def failed(self) -> None:
        """Called when the outermost call raises."""

    def add_module(self, module: nn.Module) -> None:
        """Hook calls of `module`, which may have no group."""
        # Runs before the user's forward pre-hooks and after the forward hooks, as FSDP2's hooks. A fully compiled model
        # has a graph break here, as at FSDP2's hooks.
        module.register_forward_pre_hook(torch.compiler.disable(self._enter_call), prepend=True, with_kwargs=True)
        module.register_forward_hook(torch.compiler.disable(self._leave_call), always_call=True)

    def add_method(self, owner: nn.Module, name: str) -> None:
        """Also hook `owner.name(...)`."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def enter_method(*args: Any, **kwargs: Any) -> Any:
            if self.depth:
                return method(*args, **kwargs)
            try:
                args, kwargs = self.enter(args, kwargs)
                output = method(*args, **kwargs)
            except BaseException:
                self.fail()
                raise
            return self.leave(args, output)

        setattr(owner, name, enter_method)

    def _enter_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.depth:
            self.depth += 1
            return None
        self._handled = sys.exc_info()[1]
        return self.enter(args, kwargs)

    def _leave_call(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.depth > 1:  # an inner call; if it raised, an outer one may still catch the exception
            self.depth -= 1
            return None
        error = sys.exc_info()[1]
        if output is None and error is not None and error is not self._handled:  # `always_call` after an exception
            self.fail()
            return None
        return self.leave(args, output)

    def enter(self, args: Any, kwargs: Any) -> Any:
        """Unshard for an outermost call; return its arguments."""
        compat.initialise(self.root)
        entered = compat.enter_forward(self.module, *self._call.enter(args, kwargs))
        self.depth = 1
        return entered

    def leave(self, args: Any, output: Any) -> Any:
        """Reshard after an outermost call; return the output."""
        self.depth = 0
        output = compat.leave_forward(self.module, args, without_parameters(output))
        self.after(output)
        return self._call.leave(output)

    def fail(self) -> None:
        """End an outermost call that raised."""
        self.depth = 0
        self._call.fail()
        self.failed()
        if (error := sys.exc_info()[1]) is not None:
            annotate(error, self.root)


class KeptUnsharded:
    """Groups kept unsharded on all ranks from the root's forward to the end of backward."""

    def __init__(self, groups: Iterable[Any]) -> None:
        self.groups = tuple(groups)
        for group in self.groups:
            compat.reduce_when_backward_ends(group)

    def unshard(self, *_: Any) -> None:
        """Unshard the groups before the root's forward or backward; an earlier backward may have freed them."""
        for group in self.groups:
            compat.unshard_group(group)

    def leave(self, output: Any, *, is_recorded: bool) -> None:
        """Keep the groups for the backward of `output`, or free them if autograd recorded nothing."""
        if is_recorded:
            for tensor in differentiable(output) if self.groups else ():
                tensor.register_hook(self.unshard)
        else:
            for group in self.groups:
                compat.reshard_group(group)


class RootForwardHooks(ForwardHooks):
    """Hooks of the root: also expose replicated parameters, keep groups unsharded and free stale weights."""

    def __init__(
        self,
        module: nn.Module,
        casts: Casts,
        kept: Iterable[Any],
        parts: Iterable[PartsForwardHooks],
        replicated: Replicated,
        *,
        branches: bool,
    ) -> None:
        """`branches`: whether a rank's data decide which groups run."""
        super().__init__(module, module, casts)
        self.kept, self.parts, self.replicated, self.branches = KeptUnsharded(kept), tuple(parts), replicated, branches
        self.outside = OutsideUse(compat.param_groups(module), replicated)
        if replicated:
            # Activation checkpointing runs forward code again in backward.
            compat.on_backward_start(module, replicated.expose_local_again)
            compat.on_backward_end(module, replicated.restore)

    def enter(self, args: Any, kwargs: Any) -> Any:
        """Reset, and unshard the root and groups that are kept for the whole pass."""
        if compat.was_left_midway(self.module):
            recover(self.module)  # an earlier backward raised
        self.outside.end()
        if not compat.in_backward():
            self.outside.reshard_used()
        self.replicated.expose_local()
        if self.branches and torch.is_grad_enabled():
            # A group reduces its gradients after those of its inputs, or at the end if its inputs require none. This
            # must not depend on a rank's branch, or ranks would reduce in different orders.
            args, kwargs = change_tensors((args, kwargs), wanting_gradient)
        entered = super().enter(args, kwargs)
        self.kept.unshard()
        if not compat.in_backward():
            self.outside.begin_forward()
        return entered

    def after(self, output: Any) -> None:
        """Reshard groups that this pass no longer needs."""
        self.replicated.restore()
        for entry in self.parts:
            entry.finish()
        self.kept.leave(output, is_recorded=self._call.is_recorded)
        if not self._call.is_recorded:
            # FSDP2 leaves the root unsharded. Without a backward, parameters() would return the unsharded copies: a
            # new optimizer would train those, and a step would make them stale.
            for group in compat.groups_of(self.module):
                compat.reshard_group(group)
        if not compat.in_backward():
            self.outside.begin()

    def failed(self) -> None:
        """Reshard, so that the next call works."""
        self.outside.end()
        self.replicated.restore()
        if not compat.in_backward():
            abandon_pass(self.module)


def wanting_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a detached one that requires gradients if its dtype supports them."""
    wants = tensor.requires_grad or not (tensor.is_floating_point() or tensor.is_complex())
    return tensor if wants else tensor.detach().requires_grad_()
