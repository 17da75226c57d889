"""Which code gives a module its first values, weakest first: its own reset, its framework's, the user's."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Initialiser = Callable[[], object]

# What modules call the method that computes their tables (rotary embeddings, masks) again.
_BUFFER_METHODS = ("reset_buffers", "init_buffers", "_init_buffers", "rope_init")


def initialisers_of(
    module: nn.Module, owner: nn.Module | None, init: Callable[[nn.Module], object] | None
) -> list[Initialiser]:
    """What to run on a module, weakest first, as building the model for real would have run it.

    Building runs a module's own `reset_parameters`; a framework then applies the model's `_init_weights` to it;
    a user's `model.apply(init)` comes last.

    Args:
        module: Holds its own parameters in full.
        owner: From `weights_owner`.
        init: The user's function of a module, if any.

    Ranks:
        Local.
    """
    found: list[Initialiser] = []
    if callable(getattr(module, "rope_init_fn", None)) and hasattr(module, "config"):
        found.append(lambda: _rebuild_rotary(module))
    for name in (*_BUFFER_METHODS, "_reset_parameters", "reset_parameters"):
        method = getattr(module, name, None)
        if _takes(method, 0):
            found.append(method)  # pyrefly: ignore[bad-argument-type]
    if _takes(getattr(module, "_init_weights", None), 0):
        found.append(module._init_weights)  # pyrefly: ignore[bad-argument-type]
    if owner is not None:
        found.append(lambda: owner._init_weights(module))  # pyrefly: ignore[not-callable]
    if init is not None:
        found.append(lambda: init(module))
    return found


def weights_owner(module: nn.Module, owner_above: nn.Module | None) -> nn.Module | None:
    """The nearest module, itself or above, whose `_init_weights(module)` serves it (transformers, timm, nanoGPT)."""
    return module if _takes(getattr(module, "_init_weights", None), 1) else owner_above


def _rebuild_rotary(module: Any) -> None:
    """transformers 4: the table comes from `rope_init_fn`, and `_init_weights` does not know of it."""
    table, module.attention_scaling = module.rope_init_fn(module.config, torch.device("cpu"))
    for name in ("inv_freq", "original_inv_freq"):
        if isinstance(getattr(module, name, None), torch.Tensor):
            getattr(module, name).copy_(table)


def _takes(function: object, num_args: int) -> bool:
    """Whether it can be called with exactly that many positional arguments and needs no more."""
    if not callable(function):
        return False
    try:
        signature = inspect.signature(function)
        signature.bind(*[None] * num_args)
    except TypeError:
        return False
    except ValueError:  # builtins without a signature
        return num_args == 0
    required = [
        p for p in signature.parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    return len(required) == num_args
