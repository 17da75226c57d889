"""cast_inputs(): tensors of a batch to the compute dtype and device."""

import collections
import copy
import enum
import types
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

# Never looked into: they hold no inputs, or have an identity that a copy would lose.
_OPAQUE = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    enum.Enum,
    nn.Module,
    torch.Generator,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)


def cast_inputs(batch: Any, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Any:
    """Cast the floating-point tensors in `batch` to `dtype`, and move all its tensors to `device`.

    Looks into dicts and other mappings, lists, tuples, named tuples, sets, dataclasses (frozen, slotted, with
    fields outside `__init__`), `SimpleNamespace` and plain objects, to any depth and through cycles. Types
    are kept and constructors are not run. The input is not changed: what holds a tensor is copied, all else
    is shared. An object that cannot be copied is changed in place.

    Args:
        batch: Anything.
        dtype: For floating-point tensors; integer, boolean and complex ones keep theirs. None casts nothing.
        device: Where tensors go; None moves nothing.

    Returns:
        The same structure. A tensor that occurs twice is cast once, and occurs twice in the result.

    Ranks:
        Local.
    """
    if dtype is None and device is None:
        return batch
    return _Caster(dtype, device).cast(batch)


class _Caster:
    """One walk over a structure; remembers what it has met, by identity."""

    def __init__(self, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        self._dtype, self._device = dtype, device
        # The original is kept beside its copy: an id is only unique while its object lives.
        self._met: dict[int, tuple[Any, Any]] = {}

    def cast(self, value: Any) -> Any:
        if isinstance(value, _OPAQUE):
            return value
        if id(value) in self._met:
            return self._met[id(value)][1]
        if isinstance(value, torch.Tensor):
            return self._remember(value, self._cast_tensor(value))
        if isinstance(value, PackedSequence):
            data = value.data.is_floating_point()
            return self._remember(value, value.to(self._device, self._dtype if data else None))
        if isinstance(value, types.MappingProxyType):
            return self._remember(value, types.MappingProxyType(self.cast(dict(value))))
        if isinstance(value, (tuple, set, frozenset)):
            return self._cast_fixed(value)
        if isinstance(value, (dict, list, collections.deque)):
            return self._cast_container(value)
        return self._cast_object(value)  # UserDict and other wrappers too: what they wrap is an attribute

    def _remember(self, original: Any, result: Any) -> Any:
        self._met[id(original)] = (original, result)
        return result

    def _cast_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self._device, dtype=self._dtype if tensor.is_floating_point() else None)

    def _cast_container(self, container: dict[Any, Any] | list[Any] | collections.deque[Any]) -> Any:
        result = self._remember(container, _copied(container))
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in items:
            if (new := self.cast(value)) is not value:
                result[key] = new
        self._cast_attributes(_attributes(container), result)  # of a subclass, as in ModelOutput
        return result

    def _cast_fixed(self, values: tuple[Any, ...] | set[Any] | frozenset[Any]) -> Any:
        # Met again inside itself, it stands for itself: a tuple cannot be made before what it holds.
        self._remember(values, values)
        results = [self.cast(value) for value in values]
        if all(new is old for new, old in zip(results, values, strict=True)):
            return values
        make = getattr(type(values), "_make", type(values))  # a named tuple takes one argument per field
        return self._remember(values, make(results))

    def _cast_object(self, value: Any) -> Any:
        attributes = _attributes(value)
        # A file, a tokenizer or a logger is none of our business unless it holds a tensor.
        if not any(_holds_tensor(attribute, {id(value)}) for attribute in attributes.values()):
            return self._remember(value, value)
        result = self._remember(value, _copied(value))
        self._cast_attributes(attributes, result)
        return result

    def _cast_attributes(self, attributes: dict[str, Any], result: Any) -> None:
        for name, attribute in attributes.items():
            if (new := self.cast(attribute)) is not attribute:
                object.__setattr__(result, name, new)  # frozen dataclasses refuse the ordinary way


def _attributes(value: Any) -> dict[str, Any]:
    """What an object holds in its dict and its slots."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _holds_tensor(value: Any, seen: set[int]) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, _OPAQUE) or id(value) in seen:
        return False
    seen.add(id(value))
    held = list(_attributes(value).values())
    if isinstance(value, (dict, types.MappingProxyType)):
        held += value.values()
    elif isinstance(value, (tuple, set, frozenset, list, collections.deque)):
        held += value
    return any(_holds_tensor(part, seen) for part in held)


def _copied(value: Any) -> Any:
    """A shallow copy; the value itself if there is no way to make one."""
    try:
        return copy.copy(value)
    except Exception:
        pass
    try:
        result = object.__new__(type(value))
        result.__dict__.update(value.__dict__)
    except Exception:
        return value
    return result
