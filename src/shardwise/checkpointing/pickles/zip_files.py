"""Torch's zip files: an index of their records, and a writer that streams."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.checkpointing.contents import ITEM_BYTES
from shardwise.errors import CheckpointError

LOCAL, CENTRAL, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
END64, LOCATOR64 = b"PK\x06\x06", b"PK\x06\x07"
MAX32 = 0xFFFFFFFF
"""Stands in a 32-bit field whose value is in a 64-bit one."""
_MAX_DIRECTORY_BYTES = 1 << 28


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
        if head[:4] != LOCAL:
            raise self._damaged(f"its record {name} does not start where the directory says")
        label_bytes, extra_bytes = struct.unpack_from("<HH", head, 26)
        offset = record.header_offset + 30 + label_bytes + extra_bytes
        if offset + record.num_bytes > self._num_bytes:
            raise self._damaged(f"its record {name} ends beyond the end")
        return offset, record.num_bytes

    def _find_directory(self) -> tuple[int, int, int]:
        tail_bytes = min(self._num_bytes, 22 + 20 + 56)
        tail = self._read(self._num_bytes - tail_bytes, tail_bytes)
        at = tail.rfind(END)
        if at < 0 or len(tail) - at < 22:
            raise self._damaged("it has no end of a zip file")
        count, size, begin = struct.unpack_from("<HII", tail, at + 10)
        locator = tail[at - 20 : at] if at >= 20 else b""
        if locator[:4] == LOCATOR64:
            (at64,) = struct.unpack_from("<Q", locator, 8)
            end64 = self._read(at64, 56) if at64 + 56 <= self._num_bytes else b""
            if end64[:4] != END64:
                raise self._damaged("its 64-bit directory is not where it should be")
            count, size, begin = struct.unpack_from("<QQQ", end64, 32)
        return count, size, begin

    def _parse(self, directory: bytes, count: int) -> None:
        at = 0
        for _ in range(count):
            if directory[at : at + 4] != CENTRAL or at + 46 > len(directory):
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


def _with_zip64(extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    """The three numbers, from the 64-bit field where the 32-bit ones are full."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            field = extra[at + 4 : at + 4 + length]
            wide = list(struct.unpack(f"<{len(field) // 8}Q", field[: len(field) // 8 * 8]))
            size = wide.pop(0) if size == MAX32 and wide else size
            packed = wide.pop(0) if packed == MAX32 and wide else packed
            offset = wide.pop(0) if offset == MAX32 and wide else offset
        at += 4 + length
    return size, packed, offset


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function, by name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """What the function returns for these arguments."""

    function: Global
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Instance:
    """An object made without `__init__` and given this state."""

    kind: Global
    state: Any


@dataclass(frozen=True, slots=True)
class Persistent:
    """What the reader knows under this identity: for torch, a storage."""

    identity: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Pairs:
    """A dictionary whose keys are themselves objects that only the reader can make."""

    pairs: tuple[tuple[Any, Any], ...]


def dumps(value: Any) -> bytes:
    """The pickle of `value`.

    Args:
        value: None, numbers, text, bytes, lists, tuples, sets, dictionaries, and the classes of this module.

    Raises:
        CheckpointError: Something in it is of another type.
    """
    encoder = _Encoder()
    encoder.put(value)
    return b"\x80\x02" + b"".join(encoder.parts) + b"."


class _Encoder:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._memo: dict[Any, bytes] = {}

    def put(self, value: Any) -> None:
        """Append the opcodes that leave `value` on the reader's stack."""
        # By exact type: an IntEnum or a str subclass would come back as something else.
        if (method := _METHODS.get(type(value))) is None:
            raise CheckpointError(
                f"cannot store a value of type {type(value).__module__}.{type(value).__qualname__}",
                why="a checkpoint holds tensors and plain Python values only, so that reading one runs no code",
                fix="turn it into numbers, text, lists, dictionaries or tensors in your state_dict()",
            )
        method(self, value)

    def _remembered(self, key: Any, write: Callable[[], None]) -> None:
        """Write `key` the first time, refer to it from then on."""
        if (reference := self._memo.get(key)) is not None:
            self.parts.append(reference)
            return
        write()
        index = len(self._memo)
        short = index < 256
        self.parts.append(b"q" + bytes([index]) if short else b"r" + struct.pack("<I", index))
        self._memo[key] = b"h" + bytes([index]) if short else b"j" + struct.pack("<I", index)

    def _none(self, value: None) -> None:
        self.parts.append(b"N")

    def _bool(self, value: bool) -> None:
        self.parts.append(b"\x88" if value else b"\x89")

    def _int(self, value: int) -> None:
        if 0 <= value < 256:
            self.parts.append(b"K" + bytes([value]))
        elif -(1 << 31) <= value < 1 << 31:
            self.parts.append(b"J" + struct.pack("<i", value))
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(data) < 256:
                self.parts.append(b"\x8a" + bytes([len(data)]) + data)
            else:
                self.parts.append(b"\x8b" + struct.pack("<i", len(data)) + data)

    def _float(self, value: float) -> None:
        self.parts.append(b"G" + struct.pack(">d", value))

    def _str(self, value: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self._remembered(value, lambda: self.parts.append(b"X" + struct.pack("<I", len(data)) + data))

    def _bytes(self, value: bytes) -> None:
        self._call(Call(Global("_codecs", "encode"), (value.decode("latin1"), "latin1")))

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if not value:
            self.parts.append(b")")
            return
        if len(value) > 3:
            self.parts.append(b"(")
        for each in value:
            self.put(each)
        self.parts.append({1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(value), b"t"))

    def _list(self, value: list[Any]) -> None:
        self.parts.append(b"]")
        if value:
            self.parts.append(b"(")
            for each in value:
                self.put(each)
            self.parts.append(b"e")

    def _dict(self, value: dict[Any, Any]) -> None:
        self._pairs(Pairs(tuple(value.items())))

    def _pairs(self, value: Pairs) -> None:
        self.parts.append(b"}")
        if value.pairs:
            self.parts.append(b"(")
            for key, each in value.pairs:
                self.put(key)
                self.put(each)
            self.parts.append(b"u")

    def _set(self, value: set[Any]) -> None:
        self._call(Call(Global("builtins", "set"), (list(value),)))

    def _global(self, value: Global) -> None:
        self._remembered(value, lambda: self.parts.append(f"c{value.module}\n{value.name}\n".encode()))

    def _call(self, value: Call) -> None:
        self._global(value.function)
        self._tuple(value.arguments)
        self.parts.append(b"R")

    def _instance(self, value: Instance) -> None:
        self._global(value.kind)
        self.parts.append(b")\x81")
        self.put(value.state)
        self.parts.append(b"b")

    def _persistent(self, value: Persistent) -> None:
        self._tuple(value.identity)
        self.parts.append(b"Q")


_METHODS: dict[type, Callable[[_Encoder, Any], None]] = {
    type(None): _Encoder._none,
    bool: _Encoder._bool,
    int: _Encoder._int,
    float: _Encoder._float,
    str: _Encoder._str,
    bytes: _Encoder._bytes,
    tuple: _Encoder._tuple,
    list: _Encoder._list,
    dict: _Encoder._dict,
    set: _Encoder._set,
    Global: _Encoder._global,
    Call: _Encoder._call,
    Instance: _Encoder._instance,
    Persistent: _Encoder._persistent,
    Pairs: _Encoder._pairs,
}


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
