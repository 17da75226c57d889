"""Write one rank's file of a sharded checkpoint: tensors straight from memory, checksummed on the way.

The file is a row of `torch.save` streams, as `torch.distributed.checkpoint` has them; the bytes around the tensors
are made by `torch_zip.py`. No torch here: the process that writes in the background runs this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from shardwise.checkpointing.contents import ITEM_BYTES, Box, Piece
from shardwise.checkpointing.pickles.torch_zip import tensor_frame
from shardwise.checkpointing.sharded.faults import reach
from shardwise.checkpointing.storage.byte_progress import counting
from shardwise.checkpointing.storage.checksums import BLOCK_BYTES, checksum
from shardwise.checkpointing.storage.files import Place, Writer, create, split
from shardwise.checkpointing.storage.memory import bytes_of
from shardwise.errors import CheckpointError
from shardwise.progress import Progress

_BATCH_BYTES = 8 << 20
_BATCH_BUFFERS = 512
_LARGE_BYTES = 32 << 20  # below, a thread and buffers of its own are not worth it


@dataclass(frozen=True, slots=True)
class Item:
    """A box of a tensor, ready to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    """Which part of it this is."""
    memory: Any
    """Its elements, row-major: a contiguous CPU tensor, or any buffer."""


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A box of a tensor that is in the file now."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    piece: Piece
    item_offset: int
    """The byte at which its `torch.save` stream starts."""
    item_bytes: int
    """Of that stream."""


@dataclass(frozen=True, slots=True)
class WrittenValue:
    """A plain value that is in the file now, for torch's own readers; ours take it from the manifest."""

    name: str
    item_offset: int
    item_bytes: int


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What one rank wrote: all that the manifest and torch's metadata say about its file. Picklable."""

    file: str
    num_bytes: int
    frame: int
    """The checksum of the bytes that belong to no tensor, in their order."""
    tensors: tuple[WrittenTensor, ...]
    values: tuple[WrittenValue, ...]
    block_bytes: int


def file_name(rank: int) -> str:
    """The name that `torch.distributed.checkpoint` gives the file of a rank."""
    return f"__{rank}_0.distcp"


def write_rank_file(
    path: Place,
    items: Iterable[Item],
    values: Mapping[str, bytes] | None = None,
    *,
    fsync: bool = True,
    block_bytes: int = BLOCK_BYTES,
    total: int | None = None,
    progress: Progress | None = None,
) -> FileRecord:
    """Write a new file with these tensors and values.

    Args:
        path: In the partial folder; must not be there yet.
        items: In the order in which they shall lie in the file. May be a generator that makes each item's memory
            when its turn comes; the memory must be its own.
        values: Plain values by name, each as `torch_zip.value_stream` makes it.
        fsync: Return only when the disk has the file.
        block_bytes: Bytes under one checksum.
        total: Bytes of all items, for the progress; needed where `items` is a generator.
        progress: Is told the bytes as they are written.

    Returns:
        What `commit_checkpoint` needs to know about the file.

    Raises:
        CheckpointError: The disk is full, or the system refuses otherwise. The unfinished file stays.

    Ranks:
        Local.
    """
    if isinstance(items, Sequence):
        for item in items:
            _check(item)
        total = sum(map(_num_bytes, items))
    layout = _Layout(split(path)[1], block_bytes)
    is_large = total is None or total >= _LARGE_BYTES
    with contextlib.closing(create(path, large=fsync and is_large)) as writer:
        reach("file-created")
        with counting(progress, total or 0, "writing") as count:
            _write(writer, layout.buffers(items, values or {}), (total or 0) // 2, count)
        reach("file-written")
        if fsync:
            writer.sync()
    reach("file-synced")
    return layout.record()


class _Layout:
    """Where everything goes in the file, found out while its bytes are handed over in order."""

    def __init__(self, file: str, block_bytes: int) -> None:
        self._file, self._block_bytes = file, block_bytes
        self._at = 0
        self._frame = xxhash.xxh3_64()
        self._tensors: list[WrittenTensor] = []
        self._values: list[WrittenValue] = []

    def buffers(self, items: Iterable[Item], values: Mapping[str, bytes]) -> Iterator[memoryview | bytes]:
        """All bytes of the file, in order, in buffers of at most a block."""
        for name, stream in values.items():
            self._values.append(WrittenValue(name, self._at, len(stream)))
            yield self._around(stream)
        for item in items:
            _check(item)
            start = self._at
            head, tail = tensor_frame(item.dtype, item.box.sizes, start=start)
            yield self._around(head)
            offset, sums, data = self._at, [], bytes_of(item.memory)
            for begin in range(0, len(data), self._block_bytes):
                block = data[begin : begin + self._block_bytes]
                sums.append(checksum(block))  # just before the kernel copies it, so that it is in the cache then
                yield block
            self._at += len(data)
            yield self._around(tail)
            piece = Piece(item.box, self._file, offset, tuple(sums))
            self._tensors.append(WrittenTensor(item.name, item.dtype, item.shape, piece, start, self._at - start))

    def record(self) -> FileRecord:
        """What was written, once it is."""
        frame = self._frame.intdigest()
        return FileRecord(self._file, self._at, frame, tuple(self._tensors), tuple(self._values), self._block_bytes)

    def _around(self, data: bytes) -> bytes:
        self._frame.update(data)
        self._at += len(data)
        return data


def _write(writer: Writer, buffers: Iterator[memoryview | bytes], half: int, count: Callable[[int], None]) -> None:
    """Hand the buffers on in batches, of which each is one system call."""
    batch: list[memoryview | bytes] = []
    waiting = written = 0

    def flush() -> None:
        nonlocal waiting, written
        writer.append(batch)
        if written <= half < written + waiting:
            reach("file-half-written")
        written += waiting
        count(waiting)
        batch.clear()
        waiting = 0

    for buffer in buffers:
        batch.append(buffer)
        waiting += len(buffer)
        if waiting >= _BATCH_BYTES or len(batch) >= _BATCH_BUFFERS:
            flush()
    flush()


def _check(item: Item) -> None:
    if not item.box.lies_in(item.shape) or item.dtype not in ITEM_BYTES:
        raise CheckpointError(
            f"cannot store {item.name}: {item.dtype} of shape {item.shape}, part {item.box}",
            why="the part must lie in the tensor, and the dtype be one of torch's plain ones",
        )
    if (num_bytes := len(bytes_of(item.memory))) != _num_bytes(item):
        raise CheckpointError(
            f"cannot store {item.name}: its memory has {num_bytes:,} bytes, its part of the tensor {_num_bytes(item):,}"
        )


def _num_bytes(item: Item) -> int:
    return item.box.numel * ITEM_BYTES[item.dtype]
