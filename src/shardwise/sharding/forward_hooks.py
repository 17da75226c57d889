"""What happens when a sharded module is called: inputs cast, parameters unsharded, outputs watched for backward."""

import dataclasses
import functools
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardwise import compat
from shardwise.sharding.nested_tensors import cast_floating, change_tensors, find_tensors
from shardwise.sharding.notes import annotate
from shardwise.sharding.parameter_writes import LocalValue, keep_assigned
from shardwise.sharding.registry import recover


@dataclasses.dataclass(frozen=True, slots=True)
class Casts:
    """The casts at the border of a group, done here so that they are the same on every torch.

    FSDP2's own differ between versions: before 2.13 they are skipped while activation checkpointing recomputes.
    """

    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What goes in, in the group's compute dtype."""
        return (args, kwargs) if self.input_dtype is None else cast_floating((args, kwargs), self.input_dtype)

    def output(self, output: Any) -> Any:
        """What comes out, in the group's output dtype."""
        return output if self.output_dtype is None else cast_floating(output, self.output_dtype)


def register_post_backward(group: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Reduce the group's gradients once those of these inputs are known."""
    if not torch.is_grad_enabled():
        return args, kwargs
    tensors = [tensor for tensor in find_tensors((args, kwargs)) if tensor.requires_grad]
    if not tensors:
        return args, kwargs
    replaced = dict(zip(map(id, tensors), compat.reduce_after_backward_of(group, tensors), strict=False))
    return change_tensors((args, kwargs), lambda tensor: replaced.get(id(tensor), tensor))


def gather_before_backward(module: nn.Module, output: Any, since: int) -> None:
    """Gather the group of `module` again before anything that made `output` runs backward.

    FSDP2 hooks the output tensors it finds. An in-place operation on a returned view replaces the hooked tensor in the
    graph, and tensors inside plain objects, or before torch 2.13 dataclasses, are not found at all; backward would
    then run on freed parameters. For a view the hook sits on the operation that made its base.

    Args:
        module: A module of the group.
        output: Whatever it returned.
        since: Autograd's sequence number when the module was entered. A view of something older is an input passed
            through: its base was not made by this group, and runs backward long after it.
    """

    def gather(*_: Any) -> None:
        compat.pre_backward(module)

    for tensor in differentiable(output):
        base = compat.base_of_view(tensor)
        maker = None if base is None else base.grad_fn
        if maker is not None and compat.sequence_number_of(maker) >= since:
            maker.register_prehook(gather)
        else:
            tensor.register_hook(gather)


def differentiable(output: Any) -> list[torch.Tensor]:
    """Every tensor in an output that backward can start from, also in plain objects."""
    if not torch.is_grad_enabled():
        return []
    return [tensor for tensor in find_tensors(output, objects=1) if tensor.requires_grad]


class PartsForwardHooks:
    """Runs FSDP2's hooks for a group of modules.

    FSDP2's own hooks see only the last module's output. Where that output is not part of the loss but an earlier
    module's is (the keys of a prefix whose own result is dropped), backward would run on freed parameters. Here every
    module's output gathers the group again.
    """

    def __init__(self, modules: Sequence[nn.Module], root: nn.Module, casts: Casts) -> None:
        self.modules, self.root, self.casts, self.since = tuple(modules), root, casts, 0
        self._waiting: set[nn.Module] = set()
        compat.take_over_hooks(modules[0], self._gather_before_backward)
        for module in modules:
            module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._leave)

    def finish(self) -> None:
        """Free the group though not all its modules were called in this pass."""
        if self._waiting:
            self._waiting.clear()
            compat.leave_forward(self.modules[0], (), None)

    def forget(self) -> None:
        """Start over after an exception."""
        self._waiting.clear()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        compat.initialise(self.root)
        self.since = compat.sequence_number()
        args, kwargs = self.casts.inputs(args, kwargs)
        if self._waiting and not compat.is_recomputing(module):
            for group in compat.groups_of(module):
                compat.unshard_group(group)
            return args, kwargs
        if not compat.is_recomputing(module):
            self._waiting.update(self.modules)
        return compat.enter_forward(module, args, kwargs)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if compat.is_recomputing(module):
            return self.casts.output(compat.leave_forward(module, args, output))
        self._waiting.discard(module)
        if not self._waiting:
            return self.casts.output(compat.leave_forward(module, args, output))
        self._gather_before_backward(output)
        return self.casts.output(output)

    def _gather_before_backward(self, output: Any) -> None:
        gather_before_backward(self.modules[0], output, self.since)


class Replicated:
    """The replicated parameters of one model, and the modules that use them."""

    def __init__(self) -> None:
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []

    def __bool__(self) -> bool:
        return bool(self._places)

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

    def show(self) -> None:
        """Let every module see a plain tensor; gradients flow through it to the DTensor."""
        locals_: dict[int, torch.Tensor] = {}
        for module, name, parameter in self._places:
            registered = module._parameters.get(name, parameter)
            if id(registered) not in locals_:
                assert registered is not None
                is_spread = isinstance(registered, DTensor)  # inside full_params a plain one stands here
                locals_[id(registered)] = LocalValue.apply(registered) if is_spread else registered
            # Attributes of the instance come before nn.Module's look-up of parameters.
            module.__dict__[name] = locals_[id(registered)]

    def show_again(self) -> None:
        """Show for code that backward runs again; it must see tensors that want a gradient, as the first time."""
        with torch.enable_grad():
            self.show()

    def hide(self) -> None:
        """Show the DTensors again."""
        for module, name, parameter in self._places:
            shown, registered = module.__dict__.pop(name, None), module._parameters.get(name, parameter)
            if shown is not None and isinstance(registered, DTensor):
                keep_assigned(shown, registered)


class ForwardHooks:
    """Counts entries into one group, so that FSDP2's hooks run once per outermost call.

    Without it a `forward` that dispatches to a registered method enters the hooks twice: on torch 2.5 backward then
    fails, and on every torch the inner exit frees parameters that the outer call still needs.
    """

    def __init__(self, module: nn.Module, root: nn.Module, casts: Casts) -> None:
        self.module, self.root, self.casts, self.depth, self.since = module, root, casts, 0, 0
        compat.take_over_hooks(module, self._gather_before_backward)
        # Before the user's own hooks, and after them on the way out, as FSDP2's are.
        module.register_forward_pre_hook(self._enter_call, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._leave_call, always_call=True)

    def after(self, output: Any) -> None:
        """Called once the outermost entry has left."""

    def failed(self) -> None:
        """Called when the outermost entry ends by an exception."""

    def add_method(self, owner: nn.Module, name: str) -> None:
        """Make `owner.name(...)` an entry too."""
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
        return self.enter(args, kwargs)

    def _leave_call(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.depth > 1:  # an inner call; where it raised, an outer one may still catch that
            self.depth -= 1
            return None
        if output is None and sys.exc_info()[1] is not None:  # `always_call` brought us here, not a return
            self.fail()
            return None
        return self.leave(args, output)

    def enter(self, args: Any, kwargs: Any) -> Any:
        """Gather for an outermost call; returns the arguments to call with."""
        compat.initialise(self.root)
        self.since = compat.sequence_number()
        args, kwargs = self.casts.inputs(args, kwargs)
        entered = compat.enter_forward(self.module, args, kwargs)
        self.depth = 1
        return entered

    def leave(self, args: Any, output: Any) -> Any:
        """Free after an outermost call; returns the output to hand on."""
        self.depth = 0
        output = compat.leave_forward(self.module, args, output)
        self.after(output)
        return self.casts.output(output)

    def _gather_before_backward(self, output: Any) -> None:
        gather_before_backward(self.module, output, self.since)

    def fail(self) -> None:
        """Leave an outermost call that raised."""
        self.depth = 0
        self.failed()
        if (error := sys.exc_info()[1]) is not None:
            annotate(error, self.root)


class RootForwardHooks(ForwardHooks):
    """The outermost module: also shows replicated parameters, holds held groups, and leaves no stale weights."""

    def __init__(
        self,
        module: nn.Module,
        casts: Casts,
        held: Iterable[Any],
        parts: Iterable[PartsForwardHooks],
        replicated: Replicated,
        *,
        branches: bool,
    ) -> None:
        """`branches`: the data of a rank decide which groups run."""
        super().__init__(module, module, casts)
        self.held, self.parts, self.replicated, self.branches = tuple(held), tuple(parts), replicated, branches
        for group in self.held:
            compat.reduce_when_backward_ends(group)
        if replicated:
            # Activation checkpointing runs forward code again, in backward.
            compat.on_backward_start(module, replicated.show_again)
            compat.on_backward_end(module, replicated.hide)

    def enter(self, args: Any, kwargs: Any) -> Any:
        """Start clean; gather the root and what is held for the whole pass."""
        if compat.was_left_midway(self.module):
            recover(self.module)  # an earlier backward raised
        self.replicated.show()
        if self.branches and torch.is_grad_enabled():
            # A group reduces its gradients when its inputs' are known, or last of all if they need none. Which it is
            # must not depend on the branch a rank took, or ranks would reduce in different orders.
            args, kwargs = change_tensors((args, kwargs), wanting_gradient)
        entered = super().enter(args, kwargs)
        self._gather_held()
        return entered

    def after(self, output: Any) -> None:
        """Free what this pass no longer needs."""
        self.replicated.hide()
        for entry in self.parts:
            entry.finish()
        if torch.is_grad_enabled():
            if self.held:
                for tensor in differentiable(output):
                    tensor.register_hook(self._gather_held)
        elif not compat.in_backward():
            # FSDP2 leaves the root gathered. Without a backward to follow, parameters() would list the gathered
            # copies: an optimizer built now would train those, and a step would leave them stale.
            for group in (*compat.groups_of(self.module), *self.held):
                compat.reshard_group(group)

    def failed(self) -> None:
        """Forget the step, so that the next one works."""
        self.replicated.hide()
        if not compat.in_backward():
            recover(self.module)

    def _gather_held(self, *_: Any) -> None:
        for group in self.held:
            compat.unshard_group(group)


def wanting_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or where it could have a gradient and wants none, one that does."""
    wants = tensor.requires_grad or not (tensor.is_floating_point() or tensor.is_complex())
    return tensor if wants else tensor.detach().requires_grad_()


def guard_outside_call(root: ForwardHooks, module: nn.Module) -> None:
    """Let a part of the model that is no group be called by itself: it enters through the root."""
    entered: list[bool] = []

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        entered.append(not root.depth)
        return root.enter(args, kwargs) if not root.depth else None

    def leave(_: nn.Module, args: Any, output: Any) -> Any:
        if not entered.pop():
            return None
        if output is None and sys.exc_info()[1] is not None:
            return root.fail()
        return root.leave(args, output)

    module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)
