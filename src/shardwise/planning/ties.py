"""Find parameters that are one tensor under several names, by identity or by storage. Changes nothing."""

import itertools
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.compat import storage_id
from shardwise.errors import PlanError


@dataclass(frozen=True, slots=True)
class Tensor:
    """One distinct parameter: its names, and the objects that stand for it (several only when tied by storage)."""

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]

    @property
    def parameter(self) -> nn.Parameter:
        """The object that stays when the others are replaced by it."""
        return self.parameters[0]

    @property
    def tied_by_storage(self) -> bool:
        """Whether several objects share its memory."""
        return len(self.parameters) > 1


def find_tensors(model: nn.Module) -> list[Tensor]:
    """Every distinct parameter of `model` in registration order, with all its names.

    Two `nn.Parameter` objects over the same memory are one tensor: an optimizer step on either changes both.

    Raises:
        PlanError: Two parameters overlap in memory without being the same view (a transposed tie).
    """
    names: dict[int, list[str]] = defaultdict(list)
    objects: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
        objects[id(parameter)] = parameter
    merged: dict[object, list[int]] = defaultdict(list)
    for identity, parameter in objects.items():
        merged[_view_key(parameter)].append(identity)
    tensors = [
        Tensor(tuple(name for i in same for name in names[i]), tuple(objects[i] for i in same))
        for same in merged.values()
    ]
    _refuse_partial_overlap(tensors)
    return tensors


def _view_key(parameter: nn.Parameter) -> object:
    if parameter.numel() == 0 or not _has_storage(parameter):
        return id(parameter)
    return (storage_id(parameter), parameter.storage_offset(), tuple(parameter.shape), parameter.stride())


def _has_storage(parameter: torch.Tensor) -> bool:
    # Subclasses (quantised tensors, DTensors) keep their data in inner tensors.
    return type(parameter) in (nn.Parameter, torch.Tensor)


def _refuse_partial_overlap(tensors: list[Tensor]) -> None:
    spans: dict[object, list[tuple[int, int, Tensor]]] = defaultdict(list)
    for tensor in tensors:
        parameter = tensor.parameter
        if parameter.numel() and _has_storage(parameter):
            start = int(parameter.storage_offset())
            extent = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
            spans[storage_id(parameter)].append((start, start + int(extent) + 1, tensor))
    for same in spans.values():
        same.sort(key=lambda span: span[:2])
        for (_, end, first), (start, _, second) in itertools.pairwise(same):
            if start < end:
                raise PlanError(
                    f"{first.names[0]!r} and {second.names[0]!r} share memory but are different views of it",
                    where=f"{first.names[0]}, {second.names[0]}",
                    why="sharding gives each parameter its own storage, which would silently untie them",
                    fix=f"register one parameter and compute the other in forward (e.g. {first.names[0]}.t())",
                )
