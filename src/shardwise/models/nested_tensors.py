"""Find and change tensors in nested structures, and cast batches."""

import collections
import copy
import dataclasses
import enum
import types
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from shardwise import compat

Change = Callable[[torch.Tensor], torch.Tensor]

# Never traversed: they contain no inputs, or must not be copied.
_OPAQUE = (
    str, bytes, int, float, complex, type(None), type, enum.Enum, nn.Module, torch.Generator, types.ModuleType,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType,
)  # fmt: skip
_FIXED = (tuple, set, frozenset)
_MUTABLE = (dict, list, collections.deque)


def cast_inputs(batch: Any, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Any:
    """Cast the floating-point tensors in `batch` to `dtype`, and move all its tensors to `device`.

    Traverses dicts and other mappings, lists, tuples, named tuples, sets, dataclasses (frozen, slotted, with
    fields outside `__init__`), `SimpleNamespace` and plain objects, to any depth and through cycles. Types
    are kept and constructors are not called. The input is not changed: objects that contain tensors are copied,
    all others are shared. An object that cannot be copied is changed in place.

    Args:
        batch: Any object.
        dtype: Dtype of floating-point tensors; integer, boolean and complex ones keep theirs. None: no cast.
        device: Device of the tensors; None: not moved.

    Returns:
        The same structure. A tensor that occurs twice is cast once, and occurs twice in the result.

    Ranks:
        Local.
    """
    if dtype is None and device is None:
        return batch
    walk = _TensorWalk(lambda t: t.to(device=device, dtype=dtype if t.is_floating_point() else None))
    result = walk.visit(batch)
    for _, copied in walk.copies():  # in a cycle it may refer to an original that was copied later
        for key, part, put in list(_parts(copied)):
            if (new := walk.visit(part)) is not part:
                put(copied, key, new)
    return result


class CastArguments:
    """Changes the tensor arguments of a call, and writes in-place changes back to the caller's tensors.

    A list with a changed tensor is copied. Without the write-back, items that a block appends to the copy would be
    missing in the caller's list.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[Any, Any, dict[Any, Any], dict[Any, Any]]] = []
        self._changed: list[tuple[torch.Tensor, torch.Tensor, int, Any]] = []

    def cast_floating(self, value: tuple[Any, Any], dtype: torch.dtype) -> Any:
        """Positional and keyword arguments with their floating-point tensors in `dtype`."""
        return self.change_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

    def change_tensors(self, value: tuple[Any, Any], change: Change) -> Any:
        """Positional and keyword arguments with changed tensors; see `change_tensors`."""

        def note(tensor: torch.Tensor) -> torch.Tensor:
            result = change(tensor)
            if result is not tensor and not result.is_inference():
                self._changed.append((tensor, result, result._version, result.grad_fn))
            return result

        walk = _TensorWalk(note, objects=0)
        result = walk.visit(value)
        for original, copied in walk.copies() if result is not value else ():
            if not any(original is part for part in value):
                self._copies.append((original, copied, _state(original), _state(copied)))
        return result

    def write_back(self) -> None:
        """Apply the changes of the copies to the originals."""
        for original, changed, version, grad_fn in reversed(self._changed):
            if changed._version != version:  # changed in place
                with torch.set_grad_enabled(torch.is_grad_enabled() and changed.grad_fn is not grad_fn):
                    _write(original, changed)
        for original, copied, before, after in reversed(self._copies):
            now = _state(copied)
            if now.keys() != after.keys() or any(part is not after[key] for key, part in now.items()):
                stands_for = {id(part): before[key] for key, part in after.items()}
                _set_state(original, {key: stands_for.get(id(part), part) for key, part in now.items()})
        self._changed.clear()
        self._copies.clear()


def _write(original: torch.Tensor, changed: torch.Tensor) -> None:
    """Give a tensor the values and the graph of another; with shared memory only the graph."""
    if original.data_ptr() != changed.data_ptr():
        original.copy_(changed)
    elif torch.is_grad_enabled():
        with compat.preserved_version(original):  # tensors saved for backward have these values already
            original.copy_(changed)


def _state(value: Any) -> dict[Any, Any]:
    """The contents of a mutable container or object: items and attributes, each under a unique key."""
    return {(put is _set_item, key): part for key, part, put in _parts(value)}


def _set_state(value: Any, state: dict[Any, Any]) -> None:
    items = {key: part for (is_item, key), part in state.items() if is_item}
    if isinstance(value, dict):
        for key in value.keys() - items.keys():
            del value[key]
        for key in [key for key, part in items.items() if key not in value or value[key] is not part]:
            value[key] = items[key]
    elif isinstance(value, list | collections.deque):
        value.clear()
        value.extend(items.values())
    attributes = {key: part for (is_item, key), part in state.items() if not is_item}
    for name in _attributes(value).keys() - attributes.keys():
        object.__delattr__(value, name)
    for name, part in attributes.items():
        object.__setattr__(value, name, part)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating-point tensors in `dtype`."""
    return change_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def cast_buffers(
    owner: nn.Module,
    dtype: torch.dtype,
    cast: dict[int, tuple[torch.Tensor, torch.Tensor]],
    names: Container[str] | None = None,
) -> dict[str, torch.dtype]:
    """Cast a module's own floating-point buffers, those in `names` or all; return their earlier dtypes.

    `cast` maps the id of each original to original and result; share it between the modules of a model, so that tied
    buffers stay tied.
    """
    before: dict[str, torch.dtype] = {}
    for name, buffer in owner._buffers.items():
        is_selected = buffer is not None and (names is None or name in names)
        if is_selected and buffer.is_floating_point() and buffer.dtype != dtype:
            before[name] = buffer.dtype
            if id(buffer) not in cast:
                cast[id(buffer)] = (buffer, buffer.to(dtype))
            owner._buffers[name] = cast[id(buffer)][1]
    return before


def change_tensors(value: Any, change: Change) -> Any:
    """Return the same containers and dataclasses with changed tensors; unchanged parts are shared."""
    return _TensorWalk(change, objects=0).visit(value)


def find_tensors(value: Any, objects: int = 0) -> list[torch.Tensor]:
    """Return the tensors in containers and dataclasses, each once, and in plain objects up to a depth of `objects`."""
    found: list[torch.Tensor] = []
    _TensorWalk(lambda tensor: found.append(tensor) or tensor, objects).visit(value)
    return found


class _TensorWalk:
    """One traversal of a structure; visits each object once, by identity.

    It traverses plain objects up to a depth of `objects`; -1: any depth.
    """

    def __init__(self, change: Change, objects: int = -1) -> None:
        self._change, self._objects = change, objects
        # Keep the original with its result: an id is only unique while its object lives.
        self._met: dict[int, tuple[Any, Any]] = {}

    def visit(self, value: Any) -> Any:
        if isinstance(value, _OPAQUE):
            return value
        if id(value) in self._met:
            return self._met[id(value)][1]
        if isinstance(value, torch.Tensor):
            return self._remember(value, self._change(value))
        # In a cycle, the object refers to itself.
        self._remember(value, value)
        if isinstance(value, PackedSequence):  # its batch sizes stay on the CPU
            moved = {name: self.visit(getattr(value, name)) for name in ("data", "sorted_indices", "unsorted_indices")}
            return self._remember(value, value._replace(**moved))
        if isinstance(value, types.MappingProxyType):
            new = self.visit(inner := dict(value))
            return value if new is inner else self._remember(value, types.MappingProxyType(new))
        if isinstance(value, _FIXED):
            return self._visit_fixed(value)
        if isinstance(value, _MUTABLE) or dataclasses.is_dataclass(value):
            return self._visit_parts(value)
        if not self._objects:
            return value
        self._objects -= 1
        try:
            return self._visit_parts(value)  # also UserDict and other wrappers, whose content is an attribute
        finally:
            self._objects += 1

    def copies(self) -> list[tuple[Any, Any]]:
        """Each mutable container or object that was copied, with its copy."""
        fixed = (torch.Tensor, PackedSequence, types.MappingProxyType, *_FIXED)
        pairs = self._met.values()
        return [(old, new) for old, new in pairs if new is not old and not isinstance(old, fixed)]

    def _remember(self, original: Any, result: Any) -> Any:
        self._met[id(original)] = (original, result)
        return result

    def _visit_fixed(self, values: Any) -> Any:
        results = [self.visit(value) for value in values]
        if all(new is old for new, old in zip(results, values, strict=True)):
            return values
        make = getattr(type(values), "_make", type(values))  # a named tuple takes one argument per field
        return self._remember(values, make(results))

    def _visit_parts(self, value: Any) -> Any:
        changed = [(put, key, new) for key, part, put in _parts(value) if (new := self.visit(part)) is not part]
        result = self._remember(value, _copied(value)) if changed else value
        for put, key, new in changed:
            put(result, key, new)
        return result


def _parts(value: Any) -> Iterator[tuple[Any, Any, Callable[[Any, Any, Any], None]]]:
    """Key, value and setter of each part of a container or an object."""
    if isinstance(value, dict):
        yield from ((key, item, _set_item) for key, item in value.items())
    elif isinstance(value, list | collections.deque):
        yield from ((index, item, _set_item) for index, item in enumerate(value))
    # Frozen dataclasses disallow ordinary assignment.
    yield from ((name, item, object.__setattr__) for name, item in _attributes(value).items())


def _set_item(container: Any, key: Any, item: Any) -> None:
    container[key] = item


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object in its dict and slots."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _copied(value: Any) -> Any:
    """Return a shallow copy; the value itself if it cannot be copied."""
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
