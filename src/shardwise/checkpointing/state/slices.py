"""The model's side of loading and saving: each tensor once, under its canonical names, and this rank's part of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.checkpointing.contents import ChunkSpec
from shardwise.checkpointing.state.names import canonical_name
from shardwise.planning.settings import dtype_name
from shardwise.sharding import inventory
from shardwise.sharding.full_params import reshard


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
    def is_frozen(self) -> bool:
        """Whether it is a parameter that is not trained."""
        return self.is_parameter and not self.tensor.requires_grad

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
    """This rank's chunks of a tensor, each with its memory; see `inventory.local_chunks`."""
    memory = inventory.local_tensor(tensor)
    if not isinstance(tensor, DTensor):
        return [(ChunkSpec.whole(tuple(tensor.shape)), memory)] if tensor.numel() else []
    chunks = inventory.local_chunks(tensor)
    if len(chunks) == 1:
        return [(ChunkSpec(chunks[0].starts, chunks[0].sizes), memory)]
    return [
        (ChunkSpec(chunk.starts, chunk.sizes), memory[inventory.slices_of(chunk.position, chunk.sizes)])
        for chunk in chunks
    ]


def _identity(tensor: torch.Tensor) -> object:
    """Equal for two names of one tensor: the same object, or the same view of the same memory."""
    has_storage = type(tensor) in (nn.Parameter, torch.Tensor) and tensor.numel() and tensor.device.type != "meta"
    if not has_storage:
        return id(tensor)
    return compat.storage_id(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module, under DistributedDataParallel too."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
