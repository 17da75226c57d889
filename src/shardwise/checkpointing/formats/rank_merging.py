"""Put the ranks' parts of one tensor together: which bytes of which file are which part of it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.checkpointing.contents import Box, Piece, StoredTensor
from shardwise.checkpointing.formats.rank_file_names import do_not_belong_together
from shardwise.checkpointing.pickles.state_tree import KeyPath, Ref
from shardwise.checkpointing.pickles.torch_files import TorchFile
from shardwise.checkpointing.pickles.torch_refs import DTensorRef, ShardedRef, TensorRef
from shardwise.errors import CheckpointError


def is_state(path: KeyPath) -> bool:
    """Whether it is optimizer state, of which a rank has only that of the parameters it holds a part of."""
    return len(path) >= 3 and path[-3] == "state"


def merge_ranks(name: str, ranks: Sequence[TorchFile], path: KeyPath) -> StoredTensor:
    """One tensor out of all ranks' files.

    Args:
        name: In every file that has it.
        ranks: All files, by rank.
        path: Where it stood in the state dict.

    Raises:
        CheckpointError: The parts do not fit together.

    Ranks:
        Local.
    """
    here = [(rank, file, file.state.tensors[name]) for rank, file in enumerate(ranks) if name in file.state.tensors]
    kinds = {type(ref) for _, _, ref in here}
    if len(kinds) > 1:
        raise do_not_belong_together(here[0][1].place, f"{name} is of different kinds on different ranks")
    kind = kinds.pop()
    if kind is TensorRef:
        if is_state(path) and str(path[-2]).isdigit() and len(here[0][2].shape) == 1:
            return _concatenated(name, here)
        return _replicated(name, here)
    shapes = {(ref.dtype, ref.shape) for _, _, ref in here}
    if len(shapes) > 1:
        raise do_not_belong_together(here[0][1].place, f"{name} has different shapes or dtypes on different ranks")
    parts = _parts_of_sharded(here) if kind is ShardedRef else _parts_of_dtensor(name, here, len(ranks))
    pieces = tuple(file.piece(ref, box) for box, (file, ref) in parts.items())
    dtype, shape = shapes.pop()
    return StoredTensor(name, dtype, shape, pieces)


def _replicated(name: str, here: Sequence[tuple[int, TorchFile, Ref]]) -> StoredTensor:
    """A plain tensor: every rank has a copy, of which the first counts, as in `torch.distributed.checkpoint`."""
    _, file, ref = here[0]
    assert isinstance(ref, TensorRef)
    if other := next((other for _, _, other in here if other.shape != ref.shape), None):
        raise CheckpointError(
            f"{name} is a plain tensor of shape {ref.shape} on one rank and {other.shape} on another",
            where=str(file.place),
            why="it is a shard that does not say where it belongs, as `to_local()` gives",
            fix="save the ShardedTensor or DTensor itself, or a full state dict",
        )
    return StoredTensor(name, ref.dtype, ref.shape, (file.piece(ref, Box.whole(ref.shape)),))


def _concatenated(name: str, here: Sequence[tuple[int, TorchFile, Ref]]) -> StoredTensor:
    """Flat optimizer state: what the ranks hold, one after the other."""
    pieces: list[Piece] = []
    at = 0
    for _, file, ref in here:
        if not isinstance(ref, TensorRef) or len(ref.shape) != 1 or ref.dtype != here[0][2].dtype:
            raise do_not_belong_together(file.place, f"{name} is not flat on every rank")
        if ref.shape[0]:
            pieces.append(file.piece(ref, Box((at,), ref.shape)))
        at += ref.shape[0]
    return StoredTensor(name, here[0][2].dtype, (at,), tuple(pieces))


def _parts_of_sharded(here: Sequence[tuple[int, TorchFile, Any]]) -> dict[Box, tuple[TorchFile, TensorRef]]:
    return {box: (file, part) for _, file, ref in here for box, part in ref.parts if box.numel}


def _parts_of_dtensor(
    name: str, here: Sequence[tuple[int, TorchFile, Any]], num_ranks: int
) -> dict[Box, tuple[TorchFile, TensorRef]]:
    """The parts by box; replicas of a part count once."""
    parts: dict[Box, tuple[TorchFile, TensorRef]] = {}
    for rank, file, ref in here:
        box = _box_of(name, ref, rank, file)
        if ref.local.shape != box.sizes:
            raise do_not_belong_together(file.place, f"{name} has a part of shape {ref.local.shape}, not {box.sizes}")
        if box.numel:
            parts.setdefault(box, (file, ref.local))
    return parts


def _box_of(name: str, ref: DTensorRef, rank: int, file: TorchFile) -> Box:
    starts, sizes = [0] * len(ref.shape), list(ref.shape)
    coordinate = ref.coordinate if ref.coordinate is not None else _unravel(rank, ref.mesh_shape)
    if len(coordinate) != len(ref.mesh_shape):
        raise do_not_belong_together(file.place, f"{name} lies on a mesh of another shape than its rank")
    for placement, length, index in zip(ref.placements, ref.mesh_shape, coordinate, strict=True):
        if placement[0] == "replicate":
            continue
        if placement[0] != "shard" or placement[1] >= len(sizes) or index >= length:
            raise CheckpointError(
                f"{name} is placed as {placement[0]!r}, which is not read from per-rank files",
                where=str(file.place),
                why="its parts are interleaved over two mesh axes, or not yet summed",
                fix="save it with torch.distributed.checkpoint, and read that folder",
            )
        dim = placement[1]
        chunk = -(-sizes[dim] // length)  # as torch.chunk: the last ranks may hold less, or nothing
        begin = min(chunk * index, sizes[dim])
        starts[dim] += begin
        sizes[dim] = min(chunk, sizes[dim] - begin)
    return Box(tuple(starts), tuple(sizes))


def _unravel(rank: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The place of a rank in a mesh whose ranks are numbered row by row."""
    place: list[int] = []
    for length in reversed(shape):
        rank, index = divmod(rank, max(length, 1))
        place.insert(0, index)
    return tuple(place)
