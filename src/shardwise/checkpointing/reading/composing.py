"""Tensors made of other stored tensors, stacked, joined or cut, by moving boxes: no byte is read. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from shardwise.checkpointing.contents import ITEM_BYTES, Box, Piece, StoredTensor

_MAX_PIECES = 1 << 16


def stack(tensors: Sequence[StoredTensor], dim: int) -> StoredTensor:
    """As `torch.stack`: one more dimension, along which each tensor is one row.

    Raises:
        ValueError: Shapes or dtypes differ.
    """
    widened = []
    for tensor in tensors:
        pieces = tuple(
            replace(piece, box=Box(_insert(piece.box.starts, dim, 0), _insert(piece.box.sizes, dim, 1)))
            for piece in tensor.pieces
        )
        widened.append(replace(tensor, shape=_insert(tensor.shape, dim, 1), pieces=pieces))
    return concatenate(widened, dim)


def concatenate(tensors: Sequence[StoredTensor], dim: int) -> StoredTensor:
    """As `torch.cat`.

    Raises:
        ValueError: Shapes or dtypes differ.
    """
    first = tensors[0]
    dim %= len(first.shape)
    others = {(tensor.dtype, tensor.shape[:dim], tensor.shape[dim + 1 :]) for tensor in tensors}
    if len(others) > 1 or any(len(tensor.shape) != len(first.shape) for tensor in tensors):
        raise ValueError(f"{first.name} and what it is joined with do not have the same shape and dtype")
    pieces: list[Piece] = []
    end = 0
    for tensor in tensors:
        for piece in tensor.pieces:
            starts = list(piece.box.starts)
            starts[dim] += end
            pieces.append(replace(piece, box=Box(tuple(starts), piece.box.sizes)))
        end += tensor.shape[dim]
    shape = (*first.shape[:dim], end, *first.shape[dim + 1 :])
    name = first.name if len(tensors) == 1 else f"{first.name} … {tensors[-1].name}"
    return StoredTensor(name, first.dtype, shape, tuple(pieces))


def split(tensor: StoredTensor, sizes: Sequence[int], dim: int) -> list[StoredTensor]:
    """As `torch.split`.

    Raises:
        ValueError: The sizes do not add up, or it would take too many pieces.
    """
    dim %= len(tensor.shape)
    if sum(sizes) != tensor.shape[dim]:
        raise ValueError(f"{tensor.name} of shape {list(tensor.shape)} cannot be split into {list(sizes)}")
    parts = []
    for start, end in itertools.pairwise([0, *itertools.accumulate(sizes)]):
        shape = (*tensor.shape[:dim], end - start, *tensor.shape[dim + 1 :])
        starts = (*(0,) * dim, start, *(0,) * (len(shape) - dim - 1))
        pieces = tuple(cut for piece in tensor.pieces for cut in _cut(piece, Box(starts, shape), dim, tensor.dtype))
        parts.append(StoredTensor(tensor.name, tensor.dtype, shape, pieces))
    return parts


def _cut(piece: Piece, box: Box, dim: int, dtype: str) -> list[Piece]:
    """What of a piece lies in `box`, relative to its start; as many pieces as it takes for each to be one run."""
    shared = piece.box.overlap(box)
    if shared is None:
        return []
    if piece.data is not None:
        raise ValueError("a tensor that is held in memory cannot be split")
    leading = shared.sizes[:dim]
    if math.prod(leading) > _MAX_PIECES:
        raise ValueError(f"splitting along dimension {dim} would take {math.prod(leading):,} pieces")
    strides = [math.prod(piece.box.sizes[index + 1 :]) for index in range(len(piece.box.sizes))]
    cuts = []
    for index in itertools.product(*map(range, leading)):
        starts = (*(start + step for start, step in zip(shared.starts, index, strict=False)), *shared.starts[dim:])
        first = sum((at - begin) * stride for at, begin, stride in zip(starts, piece.box.starts, strides, strict=True))
        target = tuple(at - begin for at, begin in zip(starts, box.starts, strict=True))
        sizes = (*(1,) * dim, *shared.sizes[dim:])
        # The checksums are of blocks of the whole piece, in which this one may begin anywhere.
        cuts.append(Piece(Box(target, sizes), piece.file, piece.offset + first * ITEM_BYTES[dtype]))
    return cuts


def _insert(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    dim = dim % (len(values) + 1)
    return (*values[:dim], value, *values[dim:])
