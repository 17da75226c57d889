"""The zip streams of `torch.save`: build one around bytes that lie elsewhere, or find a record's bytes in one.

Nothing is compressed, so a tensor's bytes lie in the file as they lie in memory; everything around them is known
before the first of them is written. No torch here.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.checkpointing.contents import ITEM_BYTES
from shardwise.checkpointing.pickle_writing import Call, Global, Persistent, dumps
from shardwise.errors import CheckpointError

_LOCAL, _CENTRAL, _END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_END64, _LOCATOR64 = b"PK\x06\x06", b"PK\x06\x07"
_MAX32 = 0xFFFFFFFF
_PREFIX = "archive/"
_SMALL_ALIGNMENT = 64  # what torch.save uses, too
_LARGE_ALIGNMENT = 4096  # whole pages: the kernel copies them faster
_LARGE_BYTES = 1 << 18
_MAX_DIRECTORY_BYTES = 1 << 28
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
        extra = struct.pack("<HHQQ", 1, 16, num_bytes, num_bytes) if num_bytes >= _MAX32 else b""
        alignment = _LARGE_ALIGNMENT if num_bytes >= _LARGE_BYTES else _SMALL_ALIGNMENT
        end = self._start + self.num_bytes + 30 + len(label) + len(extra) + 4
        padding = -end % alignment
        extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
        size = min(num_bytes, _MAX32)
        head = struct.pack("<HHHHHIIIHH", 45 if num_bytes >= _MAX32 else 0, _UTF8_FLAG, 0, 0, 0, crc, size, size,
                           len(label), len(extra))  # fmt: skip
        self._entries.append((label, num_bytes, crc, self.num_bytes))
        header = _LOCAL + head + label + extra
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
        if count >= 0xFFFF or begin >= _MAX32 or size >= _MAX32:
            end64 = _END64 + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, size, begin)
            end64 += _LOCATOR64 + struct.pack("<IQI", 0, begin + size, 1)
        count = min(count, 0xFFFF)
        end = _END + struct.pack("<HHHHIIH", 0, 0, count, count, min(size, _MAX32), min(begin, _MAX32), 0)
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


@dataclass(frozen=True, slots=True)
class Record:
    """Where one record of a stream lies."""

    header_offset: int
    """The byte of the stream at which its local header starts."""
    num_bytes: int
    name: str
    crc: int = 0
    """CRC-32 of its data; torch writes it and never looks at it, ours is 0 for tensors."""


class ZipIndex:
    """The directory of a stream that is already written.

    Args:
        read: Gives the bytes `[offset, offset + count)` of the stream.
        num_bytes: Of the stream.
        where: The file, for errors.
    """

    def __init__(self, read: Callable[[int, int], bytes], num_bytes: int, *, where: str) -> None:
        self._read, self._num_bytes, self._where = read, num_bytes, where
        self.records: dict[str, Record] = {}
        """By name, without the archive's own name in front."""
        self.archive = ""
        """That name: torch takes the name of the file it writes, without its ending."""
        count, size, begin = self._find_directory()
        if size > min(_MAX_DIRECTORY_BYTES, num_bytes) or begin + size > num_bytes or count * 46 > size:
            raise self._damaged("its directory has an impossible size")
        self._parse(read(begin, size), count)

    def read_record(self, name: str, limit: int) -> bytes:
        """All bytes of a small record."""
        offset, size = self.locate(name)
        if size > limit:
            raise self._damaged(f"its record {name} has {size:,} bytes, more than {limit:,}")
        return self._read(offset, size)

    def locate(self, name: str) -> tuple[int, int]:
        """The byte of the stream at which a record's data start, and how many there are."""
        if (record := self.records.get(name)) is None:
            raise self._damaged(f"it has no record {name}")
        head = self._read(record.header_offset, 30) if record.header_offset + 30 <= self._num_bytes else b""
        if head[:4] != _LOCAL:
            raise self._damaged(f"its record {name} does not start where the directory says")
        label_bytes, extra_bytes = struct.unpack_from("<HH", head, 26)
        offset = record.header_offset + 30 + label_bytes + extra_bytes
        if offset + record.num_bytes > self._num_bytes:
            raise self._damaged(f"its record {name} ends beyond the end")
        return offset, record.num_bytes

    def _find_directory(self) -> tuple[int, int, int]:
        tail_bytes = min(self._num_bytes, 22 + 20 + 56)
        tail = self._read(self._num_bytes - tail_bytes, tail_bytes)
        at = tail.rfind(_END)
        if at < 0 or len(tail) - at < 22:
            raise self._damaged("it has no end of a zip file")
        count, size, begin = struct.unpack_from("<HII", tail, at + 10)
        locator = tail[at - 20 : at] if at >= 20 else b""
        if locator[:4] == _LOCATOR64:
            (at64,) = struct.unpack_from("<Q", locator, 8)
            end64 = self._read(at64, 56) if at64 + 56 <= self._num_bytes else b""
            if end64[:4] != _END64:
                raise self._damaged("its 64-bit directory is not where it should be")
            count, size, begin = struct.unpack_from("<QQQ", end64, 32)
        return count, size, begin

    def _parse(self, directory: bytes, count: int) -> None:
        at = 0
        for _ in range(count):
            if directory[at : at + 4] != _CENTRAL or at + 46 > len(directory):
                raise self._damaged("its directory is broken")
            (method,) = struct.unpack_from("<H", directory, at + 10)
            crc, packed, size = struct.unpack_from("<III", directory, at + 16)
            label_bytes, extra_bytes, comment_bytes = struct.unpack_from("<HHH", directory, at + 28)
            (offset,) = struct.unpack_from("<I", directory, at + 42)
            label = directory[at + 46 : at + 46 + label_bytes].decode("utf-8", "replace")
            extra = directory[at + 46 + label_bytes : at + 46 + label_bytes + extra_bytes]
            size, packed, offset = _with_zip64(extra, size, packed, offset)
            self.archive, _, name = label.partition("/")
            if method != 0 or packed != size:
                raise self._damaged(f"its record {name} is compressed, which torch.save never does")
            if name in self.records:
                raise self._damaged(f"it has two records {name}")
            self.records[name] = Record(offset, size, name, crc)
            at += 46 + label_bytes + extra_bytes + comment_bytes

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(
            "the file is no torch.save file, or a damaged one",
            where=self._where,
            why=why,
            fix="load an older checkpoint, or copy this one again",
        )


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


def _central_entry(label: bytes, num_bytes: int, crc: int, offset: int) -> bytes:
    wide = [value for value in (num_bytes, num_bytes, offset) if value >= _MAX32]
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size = min(num_bytes, _MAX32)
    version = 45 if wide else 0
    head = struct.pack("<HHHHHHIIIHHHHHII", version, version, _UTF8_FLAG, 0, 0, 0, crc, size, size,
                       len(label), len(extra), 0, 0, 0, 0, min(offset, _MAX32))  # fmt: skip
    return _CENTRAL + head + label + extra


def _with_zip64(extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    """The three numbers, from the 64-bit field where the 32-bit ones are full."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            field = extra[at + 4 : at + 4 + length]
            wide = list(struct.unpack(f"<{len(field) // 8}Q", field[: len(field) // 8 * 8]))
            size = wide.pop(0) if size == _MAX32 and wide else size
            packed = wide.pop(0) if packed == _MAX32 and wide else packed
            offset = wide.pop(0) if offset == _MAX32 and wide else offset
        at += 4 + length
    return size, packed, offset
