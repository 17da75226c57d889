"""What a checkpoint holds, in any format: tensors as stored chunks, and values. No torch, no I/O."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DTYPES: dict[str, tuple[int, str, str]] = {
    "float64": (8, "F64", "DoubleStorage"),
    "float32": (4, "F32", "FloatStorage"),
    "float16": (2, "F16", "HalfStorage"),
    "bfloat16": (2, "BF16", "BFloat16Storage"),
    "float8_e4m3fn": (1, "F8_E4M3", ""),
    "float8_e4m3fnuz": (1, "F8_E4M3FNUZ", ""),
    "float8_e5m2": (1, "F8_E5M2", ""),
    "float8_e5m2fnuz": (1, "F8_E5M2FNUZ", ""),
    "float8_e8m0fnu": (1, "F8_E8M0", ""),
    "complex32": (4, "", ""),
    "complex64": (8, "C64", "ComplexFloatStorage"),
    "complex128": (16, "", "ComplexDoubleStorage"),
    "int64": (8, "I64", "LongStorage"),
    "int32": (4, "I32", "IntStorage"),
    "int16": (2, "I16", "ShortStorage"),
    "int8": (1, "I8", "CharStorage"),
    "uint64": (8, "U64", ""),
    "uint32": (4, "U32", ""),
    "uint16": (2, "U16", ""),
    "uint8": (1, "U8", "ByteStorage"),
    "bool": (1, "BOOL", "BoolStorage"),
}
"""By the name torch gives the dtype (`str(dtype)` without `torch.`): bytes of one element, the name in safetensors, and
the storage class in torch's pickles; empty where there is none."""
ITEM_BYTES = {dtype: num_bytes for dtype, (num_bytes, _, _) in DTYPES.items()}


def count_of(value: Any) -> int:
    """A size or offset that a file gives, checked.

    Raises:
        ValueError: It is none.
    """
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.60} is no size")
    return value


def sizes_of(values: Any) -> tuple[int, ...]:
    """A shape that a file gives, checked.

    Raises:
        ValueError: It is none.
    """
    if not isinstance(values, (tuple, list)) or len(values) > 64:
        raise ValueError(f"{values!r:.60} is no shape")
    return tuple(map(count_of, values))


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: from `starts`, `sizes` elements along each dimension."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        """The box that is all of a tensor."""
        return Box((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Elements in the box; a scalar has one."""
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """The part that both boxes share, or None when they share no element."""
        starts = tuple(map(max, self.starts, other.starts))
        ends = [
            min(a + size_a, b + size_b)
            for a, size_a, b, size_b in zip(self.starts, self.sizes, other.starts, other.sizes, strict=True)
        ]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return None if any(size <= 0 for size in sizes) else Box(starts, sizes)

    def lies_in(self, shape: tuple[int, ...]) -> bool:
        """Whether the box is a part of a tensor of this shape."""
        return len(shape) == len(self.starts) == len(self.sizes) and all(
            start >= 0 and size >= 0 and start + size <= length
            for start, size, length in zip(self.starts, self.sizes, shape, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """A box whose elements lie one after another (row-major) in a file, or in memory where no file has them so."""

    box: Box
    file: str = ""
    """Relative to the checkpoint's folder, with `/`. Empty when `data` is set."""
    offset: int = 0
    """The byte of `file` at which the first element starts."""
    checksums: tuple[int, ...] = ()
    """XXH3-64 of each `Contents.block_bytes` from `offset` on (the last may be shorter); empty: not checksummed."""
    data: memoryview | None = field(default=None, compare=False)
    """The bytes themselves, for the few formats that store them in no usable order."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint and where its parts lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class TorchStream:
    """One `torch.save` stream: a file, or an item of a Distributed Checkpoint file. Its records carry CRC-32s."""

    file: str
    """Relative to the checkpoint's folder, with `/`."""
    offset: int
    num_bytes: int
    name: str = ""
    """The tensor or value that it holds; empty when it is a whole file."""


@dataclass(frozen=True, slots=True)
class Contents:
    """A checkpoint, read as far as its index: nothing of the tensors' bytes yet.

    Names are flat and those of `torch.distributed.checkpoint`: `model.layers.0.weight`,
    `optim.state.layers.0.weight.exp_avg`, `optim.param_groups.0.lr`. A file of weights alone has bare names.
    """

    path: Path | str
    """The folder, or the single file; a `str` is the URL of a store that fsspec serves."""
    format: str
    """`sharded` (ours), `dcp` (torch's), `full`, `safetensors`, `fsdp1-full`, `fsdp1-sharded`, `fsdp1-local`."""
    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Any] = field(default_factory=dict)
    """Everything that is no tensor, by the same flat names, as plain Python values."""
    file_bytes: Mapping[str, int] = field(default_factory=dict)
    """How large each file must be, where the format says so."""
    block_bytes: int = 0
    """Bytes under one checksum; 0 when the format has none."""
    step: int | None = None
    world_size: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    """What else the format knows: mesh, plan, versions, dates."""
    structure: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    """Flat name to the path in the nested state dict it came from, where a dot would be ambiguous."""
    streams: tuple[TorchStream, ...] = ()
    """The `torch.save` streams that the checkpoint is made of."""

    @property
    def folder(self) -> Path | str:
        """What `Piece.file` is relative to."""
        return self.path if isinstance(self.path, str) or self.path.is_dir() else self.path.parent

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor that will be written."""

    name: str
    dtype: str
    """As in `float32`."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def coverage_problem(wanted: Box, pieces: Iterable[Box]) -> str:
    """Why the pieces do not hold every element of `wanted` exactly once; empty when they do."""
    parts = sorted(
        (part for piece in pieces if (part := piece.overlap(wanted)) is not None), key=lambda part: part.starts
    )
    num_held = sum(part.numel for part in parts)
    active: list[Box] = []
    for part in parts:
        # Sorted by start along dim 0: only boxes that reach this far can still meet it.
        active = [other for other in active if not part.starts or other.starts[0] + other.sizes[0] > part.starts[0]]
        if any(part.overlap(other) is not None for other in active):
            return "some elements are stored twice"
        active.append(part)
    if num_held != wanted.numel:
        return f"{wanted.numel - num_held:,} of {wanted.numel:,} elements are not stored"
    return ""


def boxes_of_range(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[Box, int]]:
    """Cut the elements `[start, end)` of a row-major tensor into boxes whose elements are consecutive.

    Yields:
        Each box and how many of the range's elements come before it. At most two boxes a dimension, less one.
    """
    if start >= end:
        return
    if len(shape) <= 1:
        yield Box((start,) * len(shape), (end - start,) * len(shape)), 0
        return
    row = math.prod(shape[1:])
    first, last = start // row, (end - 1) // row
    done = 0
    if first != last and start % row:
        for box, before in boxes_of_range(shape[1:], start % row, row):
            yield Box((first, *box.starts), (1, *box.sizes)), before
        done, first = row - start % row, first + 1
    full_rows = (end - first * row) // row if start + done == first * row else 0
    if full_rows:
        rest = tuple(shape[1:])
        yield Box((first, *(0 for _ in rest)), (full_rows, *rest)), done
        done, first = done + full_rows * row, first + full_rows
    if start + done < end:
        begin = start + done - first * row
        for box, before in boxes_of_range(shape[1:], begin, end - first * row):
            yield Box((first, *box.starts), (1, *box.sizes)), done + before


def rows_of(chunk: Box, wanted: Box, along: int, max_elements: int) -> Iterator[Box]:
    """Boxes of consecutive elements of the chunk that hold all wanted ones: whole rows below the dimension `along`."""
    if not chunk.sizes:
        yield chunk
        return
    inner = chunk.sizes[along + 1 :]
    count = max(max_elements // max(math.prod(inner), 1), 1)
    outer = (range(start, start + size) for start, size in zip(wanted.starts[:along], wanted.sizes, strict=False))
    end = wanted.starts[along] + wanted.sizes[along]
    for place in itertools.product(*outer):
        for begin in range(wanted.starts[along], end, count):
            starts = (*place, begin, *chunk.starts[along + 1 :])
            yield Box(starts, (*(1,) * along, min(count, end - begin), *inner))


def row_dim(chunk: Box, wanted: Box, max_elements: int) -> int:
    """The first dimension of which whole rows fit into so many elements."""
    dim = 0
    while dim < len(chunk.sizes) - 1 and (wanted.sizes[dim] == 1 or math.prod(chunk.sizes[dim + 1 :]) > max_elements):
        dim += 1
    return dim


def portions(box: Box, item_bytes: int, max_bytes: int = 64 << 20) -> Iterator[Box]:
    """The box in parts of at most `max_bytes` that follow each other in row-major order: whole rows where they fit."""
    count = max_bytes // item_bytes
    return iter([box]) if box.numel <= count else rows_of(box, box, row_dim(box, box, count), count)
