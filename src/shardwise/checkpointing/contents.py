"""Contents of a checkpoint in any format: values, and tensors as stored chunks. No torch, no I/O."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
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
"""By torch's name of the dtype (`str(dtype)` without `torch.`): bytes per element, the dtype's name in safetensors, and
the storage class in torch's pickles; an empty string if there is none."""
ITEM_BYTES = {dtype: num_bytes for dtype, (num_bytes, _, _) in DTYPES.items()}


KeyPath = tuple[str | int, ...]
"""Keys on the path to a value in a nested state dict."""


def count_of(value: Any) -> int:
    """Validate a size or offset read from a file; raises a `ValueError`."""
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.60} is not a size")
    return value


def sizes_of(values: Any) -> tuple[int, ...]:
    """Validate a shape read from a file; raises a `ValueError`."""
    if not isinstance(values, (tuple, list)) or len(values) > 64:
        raise ValueError(f"{values!r:.60} is not a shape")
    return tuple(map(count_of, values))


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """A rectangular part of a tensor: `sizes` elements along each dimension, starting at `starts`."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> ChunkSpec:
        """Return the chunk that covers a tensor."""
        return ChunkSpec((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements in the chunk; 1 for a scalar."""
        return math.prod(self.sizes)

    def overlap(self, other: ChunkSpec) -> ChunkSpec | None:
        """Return the intersection of two chunks, or None."""
        starts = tuple(map(max, self.starts, other.starts))
        ends = [
            min(a + size_a, b + size_b)
            for a, size_a, b, size_b in zip(self.starts, self.sizes, other.starts, other.sizes, strict=True)
        ]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return None if any(size <= 0 for size in sizes) else ChunkSpec(starts, sizes)

    def lies_in(self, shape: tuple[int, ...]) -> bool:
        """Whether the chunk is within a tensor of this shape."""
        return len(shape) == len(self.starts) == len(self.sizes) and all(
            start >= 0 and size >= 0 and start + size <= length
            for start, size, length in zip(self.starts, self.sizes, shape, strict=True)
        )

    def coverage_problem(self, chunks: Iterable[ChunkSpec]) -> str:
        """Return why the chunks do not cover this one exactly once; empty if they do."""
        parts = sorted(
            (part for chunk in chunks if (part := chunk.overlap(self)) is not None), key=lambda part: part.starts
        )
        num_stored = sum(part.numel for part in parts)
        active: list[ChunkSpec] = []
        for part in parts:
            # Sorted by start along dim 0: only chunks that end after this start can overlap it.
            active = [other for other in active if not part.starts or other.starts[0] + other.sizes[0] > part.starts[0]]
            if any(part.overlap(other) is not None for other in active):
                return "some elements are stored twice"
            active.append(part)
        if num_stored != self.numel:
            return f"{self.numel - num_stored:,} of {self.numel:,} elements are not stored"
        return ""

    def rows(self, wanted: ChunkSpec, max_elements: int, along: int | None = None) -> Iterator[ChunkSpec]:
        """Yield chunks of complete rows below a dimension (default: the first whose rows fit) that cover `wanted`."""
        if not self.sizes:
            yield self
            return
        if along is None:
            along, last = 0, len(self.sizes) - 1
            while along < last and (wanted.sizes[along] == 1 or math.prod(self.sizes[along + 1 :]) > max_elements):
                along += 1
        inner = self.sizes[along + 1 :]
        count = max(max_elements // max(math.prod(inner), 1), 1)
        outer = (range(start, start + size) for start, size in zip(wanted.starts[:along], wanted.sizes, strict=False))
        end = wanted.starts[along] + wanted.sizes[along]
        for place in itertools.product(*outer):
            for begin in range(wanted.starts[along], end, count):
                starts = (*place, begin, *self.starts[along + 1 :])
                yield ChunkSpec(starts, (*(1,) * along, min(count, end - begin), *inner))


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk whose elements are contiguous (row-major) in a file, or in memory."""

    spec: ChunkSpec
    file: str = ""
    """Path relative to the checkpoint's folder, with `/`. Empty if `data` is set."""
    offset: int = 0
    """Offset of the first element in `file`."""
    checksums: tuple[int, ...] = ()
    """XXH3-64 of each `Contents.block_bytes`, starting at `offset` (the last block may be shorter); empty: none."""
    data: memoryview | None = field(default=None, compare=False)
    """The bytes, for formats that do not store them contiguously."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint and its chunks."""

    name: str
    dtype: str
    """Name of the dtype, such as `float32`."""
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...] = ()
    """Empty for a tensor that has not been written yet."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def place(self) -> tuple[object, ...]:
        """Location of the tensor's bytes; equal for two names of the same bytes."""
        return tuple((chunk.spec, chunk.file, chunk.offset, id(chunk.data)) for chunk in self.chunks)

    def problem(self, wanted: ChunkSpec | None = None) -> str:
        """Return why the tensor, or a part of it, is not stored exactly once; empty if it is."""
        return (wanted or ChunkSpec.whole(self.shape)).coverage_problem(chunk.spec for chunk in self.chunks)

    def portions(self, spec: ChunkSpec | None = None, max_bytes: int = 64 << 20) -> Iterator[ChunkSpec]:
        """Split the tensor, or a part of it, into row-major chunks of at most `max_bytes`; whole rows if possible."""
        spec, count = spec or ChunkSpec.whole(self.shape), max_bytes // ITEM_BYTES[self.dtype]
        return iter([spec]) if spec.numel <= count else spec.rows(spec, count)


@dataclass(frozen=True, slots=True)
class LocalChunk:
    """A chunk of a tensor that this rank holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    spec: ChunkSpec
    memory: Any = field(default=None, compare=False)
    """Its elements in row-major order: a contiguous CPU tensor, a buffer, or an offset in the arena (`staging.py`)."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the chunk."""
        return self.spec.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class TorchStream:
    """One `torch.save` stream: a file, or an item of a Distributed Checkpoint file. Its records have CRC-32s."""

    file: str
    """Path relative to the checkpoint's folder, with `/`."""
    offset: int
    num_bytes: int
    name: str = ""
    """Name of the stored tensor or value; empty if the stream is a whole file."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The index of a checkpoint, without the tensors' bytes.

    Names are flat, as in `torch.distributed.checkpoint`: `model.layers.0.weight`,
    `optim.state.layers.0.weight.exp_avg`, `optim.param_groups.0.lr`. A file with only weights has no prefix `model.`.
    """

    path: Path | str
    """The folder or the single file; a `str` is a URL of a store that fsspec supports."""
    format: str
    """`sharded` (shardwise's), `dcp` (torch's), `full`, `safetensors`, `fsdp1-full`, `fsdp1-sharded`, `fsdp1-local`."""
    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Any] = field(default_factory=dict)
    """Everything except tensors, by flat name, as plain Python values."""
    file_bytes: Mapping[str, int] = field(default_factory=dict)
    """Required size of each file, if the format records it."""
    block_bytes: int = 0
    """Bytes per checksum; 0 if the format has no checksums."""
    step: int | None = None
    world_size: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    """Other metadata of the format: mesh, plan, versions, dates."""
    structure: Mapping[str, KeyPath] = field(default_factory=dict)
    """Path of keys by flat name, for names that do not determine the path (keys with dots)."""
    streams: tuple[TorchStream, ...] = ()
    """The `torch.save` streams of the checkpoint."""

    @property
    def folder(self) -> Path | str:
        """The folder that `StoredChunk.file` is relative to."""
        return self.path if isinstance(self.path, str) or self.path.is_dir() else self.path.parent

    def path_of(self, name: str) -> KeyPath:
        """Return the path of a tensor or value in the nested state dict; by default the name itself."""
        return self.structure.get(name, (name,))

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def merge_contents(path: Path | str, format: str, parts: Iterable[Contents]) -> Contents:
    """Merge the contents of several files or folders; if names repeat, the last value is used."""
    merged = Contents(path, format, {})
    for part in parts:
        merged = replace(
            merged,
            tensors={**merged.tensors, **part.tensors},
            values={**merged.values, **part.values},
            structure={**merged.structure, **part.structure},
            file_bytes={**merged.file_bytes, **part.file_bytes},
            streams=(*merged.streams, *part.streams),
            block_bytes=merged.block_bytes or part.block_bytes,
        )
    return merged


def chunks_of_range(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[ChunkSpec, int]]:
    """Split elements `[start, end)` of a row-major tensor into chunks, each with the number of elements before it."""
    rows = [math.prod(shape[dim:]) for dim in range(len(shape) + 1)]  # rows[dim + 1]: elements per index of dim
    at = start
    while at < end:
        # The outermost dimension of which a complete row starts here and fits.
        fitting = (dim for dim in range(len(shape)) if at % rows[dim + 1] == 0 and at + rows[dim + 1] <= end)
        if (dim := next(fitting, None)) is None:  # a scalar
            yield ChunkSpec((), ()), 0
            return
        count = min(end - at, rows[dim] - at % rows[dim]) // rows[dim + 1]
        starts = tuple(at // below % size for size, below in zip(shape, rows[1:], strict=True))
        yield ChunkSpec(starts, (*(1,) * dim, count, *shape[dim + 1 :])), at - start
        at += count * rows[dim + 1]
