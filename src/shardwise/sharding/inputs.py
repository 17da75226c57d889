"""Change the tensors in a module's inputs and outputs: cast them, or hang backward's hook on them.

Looks into what models pass between modules: lists, tuples, dicts and dataclasses, those with fields outside `__init__`
included, which torch's own walk rejects. Other objects pass as they are: a key-value cache must stay the same object.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from shardwise import compat

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Casts:
    """The casts at the border of a group, done here so that they are the same on every torch.

    FSDP2's own differ between versions: before 2.13 they are skipped while activation checkpointing recomputes.
    """

    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What goes in, in the group's compute dtype."""
        return (args, kwargs) if self.input_dtype is None else cast_floating((args, kwargs), self.input_dtype)

    def output(self, output: Any) -> Any:
        """What comes out, in the group's output dtype."""
        return output if self.output_dtype is None else cast_floating(output, self.output_dtype)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating-point tensors in `dtype`."""
    return change_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def register_post_backward(group: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Reduce the group's gradients once those of these inputs are known."""
    tensors: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensors.append(tensor)
        return tensor

    if not torch.is_grad_enabled():
        return args, kwargs
    change_tensors((args, kwargs), collect)
    if not tensors:
        return args, kwargs
    replaced = dict(zip(map(id, tensors), compat.reduce_after_backward_of(group, tensors), strict=False))
    return change_tensors((args, kwargs), lambda tensor: replaced.get(id(tensor), tensor))


def change_tensors(value: Any, change: Change) -> Any:
    """The same structure with changed tensors; parts in which nothing changed are shared."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        changed = {key: change_tensors(item, change) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        result = copy.copy(value)
        for key, item in changed.items():
            result[key] = item
        return result
    if isinstance(value, list | tuple):
        items = [change_tensors(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, list):
            result = copy.copy(value)
            result[:] = items
            return result
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _changed_dataclass(value, change)
    return value


def _changed_dataclass(value: Any, change: Change) -> Any:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    changed = {name: change_tensors(getattr(value, name), change) for name in names}
    changed = {name: item for name, item in changed.items() if item is not getattr(value, name)}
    if not changed:
        return value
    result = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(result, name, item)  # frozen dataclasses refuse the ordinary way
    return result
