"""Write small checkpoints of our sharded format for tests, with the engine's own functions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpointing.contents import ChunkSpec, LocalChunk
from shardwise.checkpointing.formats.sharded import (
    FileRecord,
    Header,
    begin_checkpoint,
    commit_checkpoint,
    file_name,
    partial_of,
    write_rank_file,
)
from shardwise.checkpointing.formats.values import encode_value
from shardwise.checkpointing.pickles.torch_files import value_stream
from shardwise.checkpointing.storage import join


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def parts_along(tensor: torch.Tensor, dim: int, num_parts: int) -> list[tuple[ChunkSpec, torch.Tensor]]:
    """The tensor cut along a dimension as torch cuts a shard: the first parts full, the last ones short or empty."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return [(ChunkSpec.whole(tuple(tensor.shape)), tensor)]
    parts = []
    for index, part in enumerate(tensor.chunk(num_parts, dim)):
        starts = [0] * tensor.dim()
        starts[dim] = index * -(-tensor.shape[dim] // num_parts)
        parts.append((ChunkSpec(tuple(starts), tuple(part.shape)), part.contiguous()))
    return parts


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    num_files: int = 2,
    dims: Mapping[str, int] | None = None,
    values: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
    structure: Mapping[str, tuple[str | int, ...]] | None = None,
    block_bytes: int = 64,
    fsync: bool = False,
) -> list[FileRecord]:
    """A committed checkpoint, every tensor cut along a dimension (default 0) over `num_files` ranks' files."""
    partial = begin_checkpoint(folder)
    values, aliases = values or {}, aliases or {}
    records = []
    for rank in range(num_files):
        items = []
        for name, tensor in tensors.items():
            parts = parts_along(tensor, (dims or {}).get(name, 0), num_files)
            if rank < len(parts):
                spec, memory = parts[rank]
                items.append(LocalChunk(name, dtype_name(tensor), tuple(tensor.shape), spec, memory))
        streams = {name: value_stream(value) for name, value in values.items()} if rank == 0 else {}
        place = join(partial, file_name(rank))
        records.append(write_rank_file(place, items, streams, fsync=fsync, block_bytes=block_bytes))
    assert partial == partial_of(folder)
    header = Header(
        step=7,
        world_size=num_files,
        values={name: encode_value(value) for name, value in values.items()},
        aliases=aliases,
        structure=structure or {name: tuple(name.split(".", 1)) for name in [*tensors, *values, *aliases]},
    )
    commit_checkpoint(folder, records, header, fsync=fsync)
    return records
