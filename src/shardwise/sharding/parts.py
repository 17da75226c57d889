"""Groups of several modules: gathered when the first of them is called, freed when all have been."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from shardwise import compat
from shardwise.sharding.inputs import Casts
from shardwise.sharding.outputs import gather_before_backward


class PartsEntry:
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
            for group in compat.state_param_groups(compat.fsdp_state(module)):
                compat.gather_group(group)
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
