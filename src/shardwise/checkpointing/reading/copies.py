"""A tied tensor that is stored under several of its names: the copies must be equal, or one of them would be lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shardwise.checkpointing.contents import ITEM_BYTES, Box, Contents, StoredTensor
from shardwise.checkpointing.reading.requests import read_box

_CHUNK_BYTES = 16 << 20


def find_differing_copy(contents: Contents, name: str, others: Sequence[str], boxes: Sequence[Box]) -> str | None:
    """The first of `others` that differs from `name` within the boxes; None when all are equal.

    Args:
        contents: The checkpoint.
        name: A stored tensor.
        others: Stored tensors that should hold the same.
        boxes: What to compare: this rank's part. Read in portions, and only where checksums do not tell.

    Ranks:
        Local.
    """
    first = contents.tensors[name]
    for other in others:
        copy = contents.tensors[other]
        if (copy.shape, copy.dtype) != (first.shape, first.dtype):
            return other
        if _surely_equal(first, copy):
            continue
        for box in boxes:
            for portion in row_portions(box, ITEM_BYTES[first.dtype]):
                ours, theirs = (read_box(contents, tensor, portion) for tensor in (first, copy))
                if not torch.equal(_bits(ours), _bits(theirs)):
                    return other
    return None


def row_portions(box: Box, item_bytes: int, max_bytes: int = _CHUNK_BYTES) -> Iterator[Box]:
    """The box in portions of whole rows, each of at most `max_bytes` as far as one row allows."""
    if not box.sizes or box.numel == 0:
        yield box
        return
    rows = max(1, max_bytes // (box.numel // box.sizes[0] * item_bytes))
    for start in range(0, box.sizes[0], rows):
        count = min(rows, box.sizes[0] - start)
        yield Box((box.starts[0] + start, *box.starts[1:]), (count, *box.sizes[1:]))


def _surely_equal(first: StoredTensor, copy: StoredTensor) -> bool:
    """The same bytes of the same files, or the same checksums of the same boxes."""
    if len(first.pieces) != len(copy.pieces):
        return False
    return all(
        a.box == b.box
        and a.data is None
        and b.data is None
        and ((a.file, a.offset) == (b.file, b.offset) or (a.checksums and a.checksums == b.checksums))
        for a, b in zip(first.pieces, copy.pieces, strict=True)
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """So that NaN equals NaN."""
    return tensor.contiguous().view(-1).view(torch.uint8)
