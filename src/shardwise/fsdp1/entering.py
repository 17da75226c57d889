"""Enter and leave a unit: FSDP1's input casts, its root's duties, and parameters summoned whole."""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from shardwise import compat
from shardwise.sharding.entering import Entry
from shardwise.sharding.inputs import Casts, cast_floating, register_post_backward
from shardwise.sharding.recovery import recover


class UnitEntry(Entry):
    """The entry of one `FullyShardedDataParallel`. Which unit is the root is known at the first forward only."""

    def __init__(self, unit: Any) -> None:
        self.unit = unit
        # A model that is compiled as a whole breaks its graph here, as it does at FSDP2's own hooks.
        self._enter_call = torch.compiler.disable(self._enter_unit)
        self._leave_call = torch.compiler.disable(self._leave_unit)
        super().__init__(unit, unit, Casts(None, None))
        for group in compat.state_param_groups(compat.fsdp_state(unit)):
            compat.replace_post_backward_hook(group, register_post_backward)
            compat.before_post_backward(group, lambda group=group: _fill_unused(group))

    @property
    def is_root(self) -> bool:
        """Whether no unit further up works with this one."""
        return not compat.is_nested_state(compat.fsdp_state(self.module))

    def before(self) -> None:
        """A step that raised in backward is forgotten before the next begins."""
        if self.is_root and compat.was_left_midway(compat.fsdp_state(self.module)):
            recover(self.module)

    def enter(self, args: Any, kwargs: Any) -> Any:
        """Cast as FSDP1 does: at the root unless told otherwise, elsewhere only if told so."""
        compat.initialise(self.module)
        if self.is_root:
            self.unit.prepare_as_root()
        precision: MixedPrecision = self.unit.mixed_precision
        asked = self.is_root and precision.cast_root_forward_inputs
        asked = asked or (precision.cast_forward_inputs and self.unit._has_params)
        if asked and precision.param_dtype is not None:
            args, kwargs = cast_floating((args, kwargs), precision.param_dtype)
        return super().enter(args, kwargs)

    def after(self, output: Any) -> None:
        """Without a backward to follow, show shards again: an optimizer or a state dict may come next."""
        if self.is_root and not torch.is_grad_enabled() and not compat.in_backward():
            for group in compat.param_groups(self.module):
                if compat.is_gathered(group):
                    compat.reshard_group(group)

    def failed(self) -> None:
        """Forget the step, so that the next one works."""
        if self.is_root and not compat.in_backward():
            recover(self.module)

    def _enter_unit(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if self.unit.is_summoned else Entry._enter_call(self, module, args, kwargs)

    def _leave_unit(self, module: nn.Module, args: Any, output: Any) -> Any:
        return None if self.unit.is_summoned else Entry._leave_call(self, module, args, output)


def _fill_unused(group: Any) -> None:
    """A flat parameter has one gradient, with zeros where a part of it was not used; so have the parts here."""
    if compat.is_in_backward(group):
        for param in group.fsdp_params:
            compat.fill_unused_gradient(group, param)
