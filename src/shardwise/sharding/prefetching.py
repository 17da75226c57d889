"""Set explicit prefetching on sharded modules, and gather the root early."""

import weakref
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardwise import compat
from shardwise.planning.plan import Plan

_EARLY_ROOTS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_installed = False


def set_prefetch(plan: Plan, modules: dict[str, nn.Module]) -> None:
    """Tell each group which others to gather ahead of their turn."""
    for group in plan.groups:
        module = modules[group.modules[0]]
        assert isinstance(module, FSDPModule)
        if group.forward_prefetch:
            module.set_modules_to_forward_prefetch([_fsdp(modules[name]) for name in group.forward_prefetch])
        if group.backward_prefetch:
            module.set_modules_to_backward_prefetch([_fsdp(modules[name]) for name in group.backward_prefetch])
    if plan.early_root:
        _gather_early(modules[""])


def _fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _gather_early(root: nn.Module) -> None:
    """Start gathering the root's parameters when its optimizer has stepped, not when forward begins."""
    global _installed
    _EARLY_ROOTS.add(root)
    root.register_load_state_dict_pre_hook(_drop_early_gather)
    if not _installed:
        register_optimizer_step_post_hook(_after_step)
        _installed = True


def _drop_early_gather(root: nn.Module, *_: Any) -> None:
    """Weights are about to be loaded: what was gathered early would hide them from the next forward."""
    for group in compat.state_param_groups(compat.fsdp_state(root)):
        compat.settle(group)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for root in _EARLY_ROOTS:
        for group in compat.state_param_groups(compat.fsdp_state(root)):
            owned = any(id(parameter) in stepped for parameter in compat.sharded_parameters(group))
            if owned and compat.is_settled(group):
                compat.start_gather(group)
