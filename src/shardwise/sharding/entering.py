"""Enter and leave sharded modules: one gather per call, however the module is entered and whatever it returns."""

import functools
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shardwise import compat
from shardwise.sharding.inputs import Casts, change_tensors
from shardwise.sharding.notes import annotate
from shardwise.sharding.outputs import differentiable, gather_before_backward
from shardwise.sharding.parts import PartsEntry
from shardwise.sharding.recovery import recover
from shardwise.sharding.replicated import Replicated


class Entry:
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

    def before(self) -> None:
        """Called before the outermost entry gathers."""

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
        self.before()
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


class RootEntry(Entry):
    """The outermost module: also shows replicated parameters, holds held groups, and leaves no stale weights."""

    def __init__(
        self,
        module: nn.Module,
        casts: Casts,
        held: Iterable[Any],
        parts: Iterable[PartsEntry],
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

    def before(self) -> None:
        """Start clean, and show replicated parameters."""
        if compat.was_left_midway(compat.fsdp_state(self.module)):
            recover(self.module)  # an earlier backward raised
        self.replicated.show()

    def enter(self, args: Any, kwargs: Any) -> Any:
        """Gather the root and what is held for the whole pass."""
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
            for group in (*compat.state_param_groups(compat.fsdp_state(self.module)), *self.held):
                compat.reshard_group(group)

    def failed(self) -> None:
        """Forget the step, so that the next one works."""
        self.replicated.hide()
        if not compat.in_backward():
            recover(self.module)

    def _gather_held(self, *_: Any) -> None:
        for group in self.held:
            compat.gather_group(group)


def wanting_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or where it could have a gradient and wants none, one that does."""
    wants = tensor.requires_grad or not (tensor.is_floating_point() or tensor.is_complex())
    return tensor if wants else tensor.detach().requires_grad_()


def guard_outside_call(root: Entry, module: nn.Module) -> None:
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
