"""Put a model and the random generators back exactly as they were."""

import random
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore every attribute of every module, and the random state, however the block ends."""
    before = [(module, dict(vars(module)), _contents(module)) for module in model.modules()]
    states = _random_states()
    try:
        yield
    finally:
        for module, attributes, contents in before:
            vars(module).clear()
            vars(module).update(attributes)
            for holder, content in contents:
                _refill(holder, content)
        _restore_random(states)


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    """The module's own lists, dictionaries and sets (hooks and parameter tables, too) with their content."""
    holders = [value for value in vars(module).values() if type(value) in (list, dict, set, OrderedDict)]
    return [(holder, holder.copy()) for holder in holders]


def _refill(holder: Any, content: Any) -> None:
    if isinstance(holder, list):
        holder[:] = content
    elif len(holder) or len(content):
        holder.clear()
        holder.update(content)


def _random_states() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    return {
        "torch": torch.random.get_rng_state(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state() if numpy is not None else None,
    }


def _restore_random(states: dict[str, Any]) -> None:
    torch.random.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if states["numpy"] is not None:
        sys.modules["numpy"].random.set_state(states["numpy"])
