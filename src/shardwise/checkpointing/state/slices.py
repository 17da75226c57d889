"""The model's side of loading and saving: each tensor once, under its canonical names, and this rank's part of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardwise import compat
from shardwise.checkpointing.contents import ChunkSpec
from shardwise.checkpointing.state.names import canonical_name
from shardwise.errors import CheckpointError
from shardwise.planning.settings import dtype_name
from shardwise.sharding.full_params import reshard
from shardwise.sharding.inventory import local_tensor


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
        own += [item for item in module._buffers.items() if item[0] not in compat.non_persistent_buffers(module)]
        named += [(canonical_name(prefix + name), tensor) for name, tensor in own if tensor is not None]
    return named


def non_persistent_names(model: nn.Module) -> set[str]:
    """Canonical names of the buffers that no state dict holds: the model computes them itself."""
    return {
        canonical_name(f"{path}.{name}" if path else name)
        for path, module in _unwrapped(model).named_modules(remove_duplicate=False)
        for name in compat.non_persistent_buffers(module)
    }


def local_chunks(tensor: torch.Tensor) -> list[tuple[ChunkSpec, torch.Tensor]]:
    """This rank's chunks of a tensor, each with its memory; none where it holds no element, or is not in the mesh.

    One chunk unless tensor parallelism interleaves the rows of several (`_StridedShard`).

    Raises:
        CheckpointError: The ranks hold partial sums, which are not parts of the tensor.
    """
    memory = local_tensor(tensor)
    if not isinstance(tensor, DTensor):
        return [(ChunkSpec.whole(tuple(tensor.shape)), memory)] if tensor.numel() else []
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or memory.numel() == 0:
        return []
    local_shape, chunks = _chunks(compat.spec_of(tensor), tuple(coordinate))
    if local_shape != memory.shape:
        raise CheckpointError(
            f"a tensor of shape {list(tensor.shape)} is cut unevenly into parts of {list(memory.shape)}",
            where=f"placements {tensor.placements} on {tensor.device_mesh}",
            why="which of its rows this rank holds does not follow from how it is placed",
            fix="choose sizes that the mesh divides evenly",
        )
    if len(chunks) == 1:
        return [(chunks[0][0], memory)]
    return [
        (chunk, memory[tuple(slice(at, at + size) for at, size in zip(position, chunk.sizes, strict=True))])
        for chunk, position in chunks
    ]


@lru_cache(maxsize=4096)  # saves ask for it while training waits
def _chunks(spec: Any, coordinate: tuple[int, ...]) -> tuple[tuple[int, ...], list[tuple[ChunkSpec, tuple[int, ...]]]]:
    """The shape of a rank's part of a DTensor, and the chunks in it, each with its position in that part."""
    runs = [_runs_along(spec, dim, coordinate) for dim in range(spec.ndim)]
    chunks = [
        (ChunkSpec(tuple(run[0] for run in chosen), tuple(run[1] for run in chosen)), tuple(run[2] for run in chosen))
        for chosen in itertools.product(*runs)
    ]
    return tuple(sum(length for _, length, _ in along) for along in runs), chunks


def _runs_along(spec: Any, dim: int, coordinate: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Rows along `dim` that follow each other in the tensor and in this rank's part: first row, count, position."""
    cuts = []
    for axis in compat.axes_in_cutting_order(spec, dim):
        placement = spec.placements[axis]
        if placement.is_partial():
            raise CheckpointError(
                f"a tensor of shape {list(spec.shape)} is held as partial sums",
                where=f"placements {spec.placements}",
                why="no rank has a part of its values before they are added up",
                fix="redistribute it to Replicate() or Shard(dim) first",
            )
        if not placement.is_replicate() and placement.dim % spec.ndim == dim:
            cuts.append((placement, spec.mesh.size(axis), coordinate[axis]))
    if all(type(placement) is Shard for placement, _, _ in cuts):
        start, length = 0, spec.shape[dim]
        for _, count, index in cuts:
            size = -(-length // count)
            offset = min(index * size, length)
            start, length = start + offset, min(size, length - offset)
        return [(start, length, 0)]
    # Placements that deal rows out in turn: let them divide the row numbers, then join neighbours.
    rows = torch.arange(spec.shape[dim], device="cpu")
    for placement, count, index in cuts:
        rows = compat.split_rows(placement, rows, count)[index]
    breaks = ((rows[1:] - rows[:-1]) != 1).nonzero().flatten().add(1).tolist() if len(rows) else []
    return [(int(rows[first]), end - first, first) for first, end in itertools.pairwise([0, *breaks, len(rows)])]


def _identity(tensor: torch.Tensor) -> object:
    """Equal for two names of one tensor: the same object, or the same view of the same memory."""
    has_storage = type(tensor) in (nn.Parameter, torch.Tensor) and tensor.numel() and tensor.device.type != "meta"
    if not has_storage:
        return id(tensor)
    return compat.storage_id(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module, under DistributedDataParallel too."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
