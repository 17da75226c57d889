"""Caches of keys and values, as transformers' layers are given: a recomputation must not fill them twice."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise.errors import ShardError

# What takes their place. A layer that is recomputed would append its keys and values a second time.
_INSTEAD = {"past_key_values": None, "past_key_value": None, "layer_past": None, "use_cache": False}


class Caches:
    """The arguments of one block by which it is given a cache.

    Args:
        module: The block.
        forward: Its forward, to know arguments by name.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._names = list(inspect.signature(forward).parameters)
        self._is_declared = any(name in _INSTEAD for name in self._names)
        indices = (getattr(inner, "layer_idx", None) for inner in module.modules())
        self._layer = next((index for index in indices if isinstance(index, int)), 0)

    def leave_out(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments without a cache; training needs none, and transformers leaves it out the same way.

        Raises:
            ShardError: The cache already holds keys for this block (prefix tuning): they would be lost.
        """
        if not self._is_declared and not any(name in _INSTEAD for name in kwargs):
            return args, kwargs
        named = zip(self._names, args, strict=False)
        args = (*(self._instead(name, value) for name, value in named), *args[len(self._names) :])
        return args, {name: self._instead(name, value) for name, value in kwargs.items()}

    def _instead(self, name: str, value: Any) -> Any:
        if name not in _INSTEAD or value is None:
            return value
        length = getattr(value, "get_seq_length", None)
        if length is not None and length(self._layer) > 0:
            raise ShardError(
                f"{name} already holds {length(self._layer)} positions",
                where=f"layer {self._layer}",
                why="a layer that is recomputed in backward would append to the cache twice",
                fix='checkpoint_activations(model, "none") where a filled cache is trained with',
            )
        return _INSTEAD[name]
