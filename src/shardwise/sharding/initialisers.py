"""Which code gives a module its first values, weakest first: its own reset, its framework's, the user's."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

Initialiser = Callable[[], object]

_RESETS = ("_reset_parameters", "reset_parameters")
# What modules call the method that computes their tables (rotary embeddings, masks) again.
_BUFFER_METHODS = ("reset_buffers", "init_buffers", "_init_buffers", "rope_init")


def initialisers_of(
    module: nn.Module, owner: nn.Module | None, init: Callable[[nn.Module], object] | None
) -> list[Initialiser]:
    """What to run on a module, weakest first, as building the model for real would have run it.

    Building runs a module's own `reset_parameters`; a framework then applies the model's `_init_weights`;
    a user's `model.apply(init)` comes last.

    Args:
        module: Holds its own parameters in full.
        owner: From `weights_owner`.
        init: The user's function of a module, if any.

    Ranks:
        Local.
    """
    found: list[Initialiser] = []
    if hasattr(module, "config"):
        found.append(lambda: _write_configured(module))
    for name in _BUFFER_METHODS:
        found += [getattr(module, name)] if _takes(getattr(module, name, None), 0) else []
    if is_parametrized(module):
        found.append(lambda: _reset_parametrized(module))
    else:
        found += _resets_of(module)
    if _takes(getattr(module, "_init_weights", None), 0):
        found.append(module._init_weights)  # pyrefly: ignore[bad-argument-type]
    if owner is not None:
        found.append(lambda: owner._init_weights(module))  # pyrefly: ignore[not-callable]
    if init is not None:
        found.append(lambda: init(module))
    return found


def weights_owner(module: nn.Module, owner_above: nn.Module | None) -> nn.Module | None:
    """The nearest module, itself or above, whose `_init_weights(module)` serves it, as in transformers."""
    return module if _takes(getattr(module, "_init_weights", None), 1) else owner_above


def _resets_of(module: nn.Module) -> list[Initialiser]:
    return [getattr(module, name) for name in _RESETS if _takes(getattr(module, name, None), 0)]


def _write_configured(module: Any) -> None:
    """Write what transformers computes in `__init__` from the config but not in `_init_weights`."""
    for name, parameter in module.named_parameters(recurse=False):
        value = getattr(module.config, f"{name}_init_value", None)  # CLIP's logit_scale
        if isinstance(value, int | float):
            nn.init.constant_(parameter, value)
    if callable(getattr(module, "rope_init_fn", None)):  # rotary tables of transformers 4
        table, module.attention_scaling = module.rope_init_fn(module.config, torch.device("cpu"))
        for name in ("inv_freq", "original_inv_freq"):
            if isinstance(getattr(module, name, None), torch.Tensor):
                getattr(module, name).copy_(table)


def _reset_parametrized(module: Any) -> None:
    """Reset tensors as they were before parametrisation (weight_norm), then write what they are made of."""
    first = next(iter(module.parametrizations))
    lineage = type(module).__mro__
    made = next(index for index, kind in enumerate(lineage) if isinstance(vars(kind).get(first), property))
    plain: Any = object.__new__(lineage[made + 1])
    plain.__dict__.update(module.__dict__)
    shown = {name: getattr(module, name) for name in module.parametrizations}
    plain.__dict__["_parameters"] = {
        **module._parameters,
        **{name: nn.Parameter(torch.empty_like(tensor), requires_grad=False) for name, tensor in shown.items()},
    }
    for reset in _resets_of(plain):
        reset()
    for name, steps in module.parametrizations.items():
        value = plain._parameters[name]
        for step in reversed(steps):
            value = step.right_inverse(value) if hasattr(step, "right_inverse") else value
        if steps.is_tensor:
            steps.original.copy_(value)
        else:
            for number, part in enumerate(value):
                getattr(steps, f"original{number}").copy_(part)


def _takes(function: object, num_args: int) -> bool:
    """Whether it can be called with exactly that many positional arguments and needs no more."""
    if not callable(function):
        return False
    try:
        signature = inspect.signature(function)
        signature.bind(*[None] * num_args)
    except (TypeError, ValueError):  # it needs others, or is a builtin without a signature
        return False
    parameters = signature.parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return len(required) == num_args
