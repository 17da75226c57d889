"""Build the zip streams of `torch.save` around bytes that lie elsewhere. No torch.

Nothing is compressed, so a tensor's bytes lie in the file as they lie in memory; everything around them is known
before the first of them is written.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

from shardwise.checkpointing.contents import ITEM_BYTES
from shardwise.checkpointing.pickles.pickle_writing import Call, Global, Persistent, dumps
from shardwise.checkpointing.pickles.zip_index import CENTRAL, END, END64, LOCAL, LOCATOR64, MAX32

_PREFIX = "archive/"
_SMALL_ALIGNMENT = 64  # what torch.save uses, too
_LARGE_ALIGNMENT = 4096  # whole pages: the kernel copies them faster
_LARGE_BYTES = 1 << 18
_UTF8_FLAG = 0x800

_STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
}
"""Dtypes that torch pickles as a typed storage; the others go as an untyped one with the dtype beside it."""


class ZipStream:
    """Builds a `torch.save` stream record by record; the caller writes what each call returns, in that order.

    Args:
        start: The byte of the file at which the stream starts; only the alignment of records depends on it.
    """

    def __init__(self, start: int = 0) -> None:
        self._start = start
        self._entries: list[tuple[bytes, int, int, int]] = []  # name, size, crc, offset of its header
        self.num_bytes = 0
        """Bytes of the stream so far."""

    def record(self, name: str, num_bytes: int, *, crc: int = 0) -> bytes:
        """The header of a record; `num_bytes` of data must follow it.

        torch never checks the CRC of a record, and one of tensor data would have to be known before the header:
        left at 0, `torch.load` is content, `unzip` is not.
        """
        label = (_PREFIX + name).encode()
        extra = struct.pack("<HHQQ", 1, 16, num_bytes, num_bytes) if num_bytes >= MAX32 else b""
        alignment = _LARGE_ALIGNMENT if num_bytes >= _LARGE_BYTES else _SMALL_ALIGNMENT
        end = self._start + self.num_bytes + 30 + len(label) + len(extra) + 4
        padding = -end % alignment
        extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
        size = min(num_bytes, MAX32)
        head = struct.pack("<HHHHHIIIHH", 45 if num_bytes >= MAX32 else 0, _UTF8_FLAG, 0, 0, 0, crc, size, size,
                           len(label), len(extra))  # fmt: skip
        self._entries.append((label, num_bytes, crc, self.num_bytes))
        header = LOCAL + head + label + extra
        self.num_bytes += len(header) + num_bytes
        return header

    def whole(self, name: str, data: bytes) -> bytes:
        """A small record with its data."""
        return self.record(name, len(data), crc=zlib.crc32(data)) + data

    def opening(self, pickled: bytes) -> bytes:
        """The records that every stream has, around the pickle of what was saved."""
        parts = {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n"}
        return b"".join(self.whole(name, data) for name, data in parts.items())

    def close(self) -> bytes:
        """The directory, which ends the stream."""
        begin = self.num_bytes
        directory = b"".join(_central_entry(*entry) for entry in self._entries)
        count, size = len(self._entries), len(directory)
        end64 = b""
        if count >= 0xFFFF or begin >= MAX32 or size >= MAX32:
            end64 = END64 + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, size, begin)
            end64 += LOCATOR64 + struct.pack("<IQI", 0, begin + size, 1)
        count = min(count, 0xFFFF)
        end = END + struct.pack("<HHHHIIH", 0, 0, count, count, min(size, MAX32), min(begin, MAX32), 0)
        tail = directory + end64 + end
        self.num_bytes += len(tail)
        return tail


def tensor_frame(dtype: str, shape: Sequence[int], *, start: int = 0) -> tuple[bytes, bytes]:
    """What goes before and after a tensor's row-major bytes so that all three are what `torch.save` writes.

    Args:
        dtype: As in `float32`.
        shape: Of the tensor.
        start: The byte of the file at which the stream starts.
    """
    num_elements = 1
    for size in shape:
        num_elements *= size
    stream = ZipStream(start)
    head = stream.opening(dumps(tensor_call(dtype, shape, "0")))
    head += stream.record("data/0", num_elements * ITEM_BYTES[dtype])
    return head, stream.close()


def value_stream(value: Any) -> bytes:
    """What `torch.save` writes for a plain value."""
    stream = ZipStream()
    head = stream.opening(dumps(value))
    return head + stream.close()


def tensor_call(dtype: str, shape: Sequence[int], key: str) -> Call:
    """How a pickle says: the contiguous tensor whose bytes are the record `data/<key>`."""
    sizes, strides = tuple(shape), _row_major(shape)
    num_elements = 1
    for size in sizes:
        num_elements *= size
    no_hooks = Call(Global("collections", "OrderedDict"), ())
    if (storage := _STORAGES.get(dtype)) is not None:
        identity = ("storage", Global("torch", storage), key, "cpu", num_elements)
        rebuild = Global("torch._utils", "_rebuild_tensor_v2")
        return Call(rebuild, (Persistent(identity), 0, sizes, strides, False, no_hooks))
    identity = ("storage", Global("torch.storage", "UntypedStorage"), key, "cpu", num_elements * ITEM_BYTES[dtype])
    rebuild = Global("torch._utils", "_rebuild_tensor_v3")
    return Call(rebuild, (Persistent(identity), 0, sizes, strides, False, no_hooks, Global("torch", dtype)))


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def _central_entry(label: bytes, num_bytes: int, crc: int, offset: int) -> bytes:
    wide = [value for value in (num_bytes, num_bytes, offset) if value >= MAX32]
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size = min(num_bytes, MAX32)
    version = 45 if wide else 0
    head = struct.pack("<HHHHHHIIIHHHHHII", version, version, _UTF8_FLAG, 0, 0, 0, crc, size, size,
                       len(label), len(extra), 0, 0, 0, 0, min(offset, MAX32))  # fmt: skip
    return CENTRAL + head + label + extra
