"""Optimizers built before wrapping: FSDP1 with `use_orig_params=True` kept the parameter objects, FSDP2 does not."""

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.sharding.repointing import Remembered, remember_parameters, repoint
from shardwise.sharding.state_order import follow_names

_SHARDED: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
"""Identity of a replaced parameter to the sharded one; an entry goes with either of the two."""
_REPLACED: dict[int, weakref.ref[torch.Tensor]] = {}
_is_watching = False

Places = list[tuple[nn.Module, str, nn.Parameter]]


def find_places(module: nn.Module) -> Places:
    """Where each parameter of a module is registered, before sharding replaces it."""
    return [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None
    ]


def remember_replaced(places: Places) -> None:
    """Let optimizers that hold parameters of before the sharding find the sharded ones at their next step.

    Args:
        places: From `find_places`, before the sharding.

    Ranks:
        Local.
    """
    global _is_watching
    if not _is_watching:
        register_optimizer_step_pre_hook(_before_step)
        _is_watching = True
    for owner, name, old in places:
        new = owner._parameters[name]
        if new is not None and new is not old:
            _SHARDED[id(old)] = new
            _REPLACED[id(old)] = weakref.ref(old, functools.partial(_forget, id(old)))


def _forget(key: int, _: object) -> None:
    _REPLACED.pop(key, None)
    _SHARDED.pop(key, None)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    adopt(optimizer)
    follow_names(optimizer)


def adopt(optimizer: Optimizer) -> None:
    """Point an optimizer that was built before the wrapping at the sharded parameters; others are left alone.

    Ranks:
        Local.
    """
    if not _REPLACED:
        return
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    pairs = {id(old): new for old in held if (new := _sharded(old)) is not None}
    if pairs:
        _repoint(optimizer, held, pairs)


def _sharded(old: torch.Tensor) -> nn.Parameter | None:
    reference = _REPLACED.get(id(old))
    return _SHARDED.get(id(old)) if reference is not None and reference() is old else None


def _repoint(optimizer: Optimizer, held: Iterable[torch.Tensor], pairs: dict[int, nn.Parameter]) -> None:
    """In place, so that schedulers keep working; state is split as its parameter is."""
    before, after = nn.Module(), nn.Module()
    for index, old in enumerate(held):
        before.register_parameter(str(index), old)  # pyrefly: ignore[bad-argument-type]
        after.register_parameter(str(index), pairs.get(id(old), old))  # pyrefly: ignore[bad-argument-type]
    remembered: Remembered = remember_parameters(before, [optimizer])
    repoint([optimizer], remembered, after)
