"""The model's side of loading and saving: each tensor once, under its canonical names, and this rank's part of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardwise import compat
from shardwise.checkpointing.contents import Box
from shardwise.checkpointing.state.names import canonical_name
from shardwise.errors import CheckpointError
from shardwise.sharding.full_params import reshard
from shardwise.sharding.inventory import local_tensor

if TYPE_CHECKING:
    from shardwise.checkpointing.reading import Request


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """One tensor of a model's state dict."""

    name: str
    """Canonical: without what torch.compile, activation checkpointing or DistributedDataParallel put into it."""
    aliases: tuple[str, ...]
    """Its other canonical names, where it is tied."""
    tensor: torch.Tensor
    """As registered: a DTensor where it is sharded."""
    is_parameter: bool

    @property
    def names(self) -> tuple[str, ...]:
        """All its names, the first one first."""
        return (self.name, *self.aliases)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        """As `contents.ITEM_BYTES` names it."""
        return dtype_name(self.tensor.dtype)


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, and the memory in which this rank holds it."""

    box: Box
    memory: torch.Tensor
    """Shares the tensor's storage; of the box's sizes; on any device, of any strides."""


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def model_tensors(model: nn.Module) -> list[ModelTensor]:
    """Every parameter and persistent buffer of the model once, in the order of its state dict.

    Gathered groups are sharded again first, so that the tensors are those an optimizer updates.

    Ranks:
        Local. The same names in the same order on every rank whose model is the same.
    """
    reshard(model)
    found: dict[object, tuple[torch.Tensor, bool, list[str]]] = {}
    for name, tensor in named_state(model):
        _, _, names = found.setdefault(_identity(tensor), (tensor, isinstance(tensor, nn.Parameter), []))
        names.append(name)
    return [
        ModelTensor(names[0], tuple(dict.fromkeys(names[1:])), tensor, is_parameter)
        for tensor, is_parameter, names in found.values()
    ]


def named_state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Canonical name and tensor of everything that the model's state dict holds, tied tensors under each name."""
    named: list[tuple[str, torch.Tensor]] = []
    for path, module in _unwrapped(model).named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        own = [*module._parameters.items()]
        own += [item for item in module._buffers.items() if item[0] not in module._non_persistent_buffers_set]
        named += [(canonical_name(prefix + name), tensor) for name, tensor in own if tensor is not None]
    return named


def non_persistent_names(model: nn.Module) -> set[str]:
    """Canonical names of the buffers that no state dict holds: the model computes them itself."""
    return {
        canonical_name(f"{path}.{name}" if path else name)
        for path, module in _unwrapped(model).named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }


def parts_of(tensor: torch.Tensor) -> list[Part]:
    """What this rank holds of a tensor; nothing where it holds no element of it, or is not in its mesh.

    One box unless tensor parallelism interleaves the rows of several (`_StridedShard`).

    Raises:
        CheckpointError: The ranks hold partial sums, which are no part of the tensor.

    Ranks:
        Local.
    """
    memory = local_tensor(tensor)
    if not isinstance(tensor, DTensor):
        return [Part(Box.whole(tuple(tensor.shape)), memory)] if tensor.numel() else []
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or memory.numel() == 0:
        return []
    runs = [_runs_along(tensor, dim, coordinate) for dim in range(tensor.ndim)]
    if [sum(run.length for run in along) for along in runs] != list(memory.shape):
        raise CheckpointError(
            f"a tensor of shape {list(tensor.shape)} is cut unevenly into parts of {list(memory.shape)}",
            where=f"placements {tensor.placements} on {tensor.device_mesh}",
            why="which of its rows this rank holds does not follow from how it is placed",
            fix="choose sizes that the mesh divides evenly",
        )
    parts = []
    for chosen in itertools.product(*runs):
        box = Box(tuple(run.start for run in chosen), tuple(run.length for run in chosen))
        view = memory
        for dim, run in enumerate(chosen):
            if run.length != memory.shape[dim]:
                view = view.narrow(dim, run.position, run.length)
        parts.append(Part(box, view))
    return parts


def requests_for(tensors: Iterable[ModelTensor], stored_names: Mapping[str, str]) -> list[Request]:
    """What to read, and where to put it: this rank's part of each tensor that has a stored name.

    Args:
        tensors: The model's.
        stored_names: `ModelTensor.name` to the name in the checkpoint; others are left out.

    Ranks:
        Local.
    """
    from shardwise.checkpointing.reading import Request

    return [
        Request(stored_names[tensor.name], part.memory, part.box)
        for tensor in tensors
        if tensor.name in stored_names
        for part in parts_of(tensor.tensor)
    ]


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows that lie one after another both in the whole tensor and in this rank's memory."""

    start: int
    length: int
    position: int
    """The first of them in this rank's memory."""


def _runs_along(tensor: DTensor, dim: int, coordinate: Sequence[int]) -> list[_Run]:
    """The rows along `dim` that this rank holds, as the mesh's axes cut them one after the other."""
    cuts = []
    for axis in compat.axes_in_cutting_order(tensor, dim):
        placement, index = tensor.placements[axis], coordinate[axis]
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise CheckpointError(
                f"a tensor of shape {list(tensor.shape)} is held as partial sums",
                where=f"placements {tensor.placements}",
                why="no rank has a part of its values before they are added up",
                fix="redistribute it to Replicate() or Shard(dim) first",
            )
        if placement.dim % tensor.ndim == dim:  # pyrefly: ignore[missing-attribute]  # all others have it
            cuts.append((placement, tensor.device_mesh.size(axis), index))
    if any(type(placement) is not Shard for placement, _, _ in cuts):
        return _interleaved_runs(tensor.shape[dim], cuts)
    start, length = 0, tensor.shape[dim]
    for _, count, index in cuts:
        size = -(-length // count)
        offset = min(index * size, length)
        start, length = start + offset, min(size, length - offset)
    return [_Run(start, length, 0)]


def _interleaved_runs(size: int, cuts: Sequence[tuple[object, int, int]]) -> list[_Run]:
    """The same for placements that deal rows out in turn: let them divide the row numbers, then join neighbours."""
    rows = torch.arange(size)
    for placement, count, index in cuts:
        rows = compat.split_rows(placement, rows, count)[index]
    runs: list[_Run] = []
    breaks = ((rows[1:] - rows[:-1]) != 1).nonzero().flatten().add(1).tolist() if len(rows) else []
    for first, end in itertools.pairwise([0, *breaks, len(rows)]):
        runs.append(_Run(int(rows[first]), end - first, first))
    return runs


def _identity(tensor: torch.Tensor) -> object:
    """Equal for two names of one tensor: the same object, or the same view of the same memory."""
    has_storage = type(tensor) in (nn.Parameter, torch.Tensor) and tensor.numel() and tensor.device.type != "meta"
    if not has_storage:
        return id(tensor)
    return compat.storage_id(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module, under DistributedDataParallel too."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
