"""Torch's zip files: an index of their records, and a writer that streams."""

from __future__ import annotations

import functools
import io
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from shardwise.checkpointing.contents import DTYPES, ITEM_BYTES
from shardwise.checkpointing.storage.files import damaged
from shardwise.errors import CheckpointError

LOCAL, CENTRAL, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
END64, LOCATOR64 = b"PK\x06\x06", b"PK\x06\x07"
MAX32 = 0xFFFFFFFF
"""Stands in a 32-bit field whose value is in a 64-bit one."""
_MAX_DIRECTORY_BYTES = 1 << 28
_ZIP_ERRORS = (OSError, ValueError, RuntimeError, EOFError, OverflowError, IndexError, struct.error)


class ZipIndex:
    """The directory of a stream that is already written.

    Args:
        read: Gives the bytes `[offset, offset + count)` of the stream.
        num_bytes: Of the stream.
        where: The file, for errors.
    """

    def __init__(self, read: Callable[[int, int], bytes], num_bytes: int, *, where: str) -> None:
        self._read, self._num_bytes, self.where = read, num_bytes, where
        self.records: dict[str, zipfile.ZipInfo] = {}
        """By name, without the archive's own name in front."""
        self.archive = ""
        """That name: torch takes the name of the file it writes, without its ending."""
        try:
            found = zipfile.ZipFile(_Stream(read, num_bytes)).infolist()
        except (zipfile.BadZipFile, *_ZIP_ERRORS) as error:
            raise self._damaged(f"its directory cannot be read: {error}") from None
        for info in found:
            self.archive, _, name = info.filename.partition("/")
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                raise self._damaged(f"its record {name} is compressed, which torch.save never does")
            if name in self.records:
                raise self._damaged(f"it has two records {name}")
            self.records[name] = info

    def read_record(self, name: str, limit: int) -> bytes:
        """All bytes of a small record."""
        offset, size = self.locate(name)
        if size > limit:
            raise self._damaged(f"its record {name} has {size:,} bytes, more than {limit:,}")
        return self._read(offset, size)

    def locate(self, name: str) -> tuple[int, int]:
        """The byte of the stream at which a record's data start, and how many there are."""
        if (info := self.records.get(name)) is None:
            raise self._damaged(f"it has no record {name}")
        start = info.header_offset
        head = self._read(start, 30) if 0 <= start <= self._num_bytes - 30 else b""
        if head[:4] != LOCAL:
            raise self._damaged(f"its record {name} does not start where the directory says")
        offset = start + 30 + sum(struct.unpack_from("<HH", head, 26))
        if offset + info.file_size > self._num_bytes:
            raise self._damaged(f"its record {name} ends beyond the end")
        return offset, info.file_size

    def _damaged(self, why: str) -> CheckpointError:
        return damaged("the file is not a torch.save file, or a damaged one", self.where, why)


class _Stream(io.BytesIO):
    """Bytes of a file that are read when they are asked for, and never too many at once."""

    def __init__(self, read: Callable[[int, int], bytes], num_bytes: int) -> None:
        super().__init__()
        self._read, self._num_bytes, self._at = read, num_bytes, 0

    def seek(self, offset: int, whence: int = 0, /) -> int:
        at = (0, self._at, self._num_bytes)[whence] + offset
        if at < 0:
            raise OSError("a place before the start")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = None, /) -> bytes:
        left = max(self._num_bytes - self._at, 0)
        size = left if size is None or size < 0 else min(size, left)
        if size > _MAX_DIRECTORY_BYTES:
            raise ValueError(f"a directory of {size:,} bytes")
        data = self._read(self._at, size) if size else b""
        self._at += size
        return data


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function, by name."""

    module: str
    name: str


known_global = functools.cache(Global)
"""The same object for the same name, so that a pickle names it once."""


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
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2, fix_imports=False).dump(value)
    return buffer.getvalue()


# The pickler in Python, which can write names of what is not there; stubs know only the one in C.
_PythonPickler: Any = vars(pickle)["_Pickler"]


class _Pickler(_PythonPickler):
    """Python's own for plain values; classes and functions are written by name, and need not be there."""

    def reducer_override(self, obj: Any) -> Any:
        """Refuse what is of another type than those known, which would run code when it is read."""
        # By exact type: an IntEnum or a str subclass would come back as something else.
        if type(obj) in self.dispatch:
            return NotImplemented
        raise CheckpointError(
            f"cannot store a value of type {type(obj).__module__}.{type(obj).__qualname__}",
            why="a checkpoint holds tensors and plain Python values only, so that reading one runs no code",
            fix="turn it into numbers, text, lists, dictionaries or tensors in your state_dict()",
        )

    def persistent_id(self, obj: Any) -> Any:
        """A storage stands in the pickle as its identity."""
        return obj.identity if isinstance(obj, Persistent) else None

    def _save_global(self, value: Global) -> None:
        self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
        self.memoize(value)

    def _save_call(self, value: Call) -> None:
        self.save(value.function)
        self.save(value.arguments)
        self.write(pickle.REDUCE)

    def _save_instance(self, value: Instance) -> None:
        self.save(value.kind)
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        self.save(value.state)
        self.write(pickle.BUILD)

    def _save_pairs(self, value: Pairs) -> None:
        self.write(pickle.EMPTY_DICT + pickle.MARK)
        for key, item in value.pairs:
            self.save(key)
            self.save(item)
        self.write(pickle.SETITEMS)

    def _save_bytes(self, value: bytes) -> None:
        self._save_call(Call(known_global("_codecs", "encode"), (value.decode("latin1"), "latin1")))

    def _save_set(self, value: set[Any]) -> None:
        self._save_call(Call(known_global("builtins", "set"), (list(value),)))

    dispatch: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        kind: _PythonPickler.dispatch[kind] for kind in (type(None), bool, int, float, str, tuple, list, dict)
    }
    dispatch |= {Global: _save_global, Call: _save_call, Instance: _save_instance, Pairs: _save_pairs}
    dispatch |= {bytes: _save_bytes, set: _save_set}


_PREFIX = "archive/"
_SMALL_ALIGNMENT = 64  # what torch.save uses, too
_LARGE_ALIGNMENT = 4096  # whole pages: the kernel copies them faster
_LARGE_BYTES = 1 << 18
_UTF8_FLAG = 0x800


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
    stream = ZipStream(start)
    head = stream.opening(dumps(tensor_call(dtype, shape, "0")))
    head += stream.record("data/0", math.prod(shape) * ITEM_BYTES[dtype])
    return head, stream.close()


def value_stream(value: Any) -> bytes:
    """What `torch.save` writes for a plain value."""
    stream = ZipStream()
    head = stream.opening(dumps(value))
    return head + stream.close()


def tensor_call(dtype: str, shape: Sequence[int], key: str) -> Call:
    """How a pickle says: the contiguous tensor whose bytes are the record `data/<key>`."""
    sizes, num_elements = tuple(shape), math.prod(shape)
    strides = tuple(math.prod(max(size, 1) for size in sizes[dim + 1 :]) for dim in range(len(sizes)))
    no_hooks = Call(known_global("collections", "OrderedDict"), ())
    if storage := DTYPES[dtype][2]:  # the others go as an untyped one with the dtype beside it
        identity = ("storage", known_global("torch", storage), key, "cpu", num_elements)
        rebuild = known_global("torch._utils", "_rebuild_tensor_v2")
        return Call(rebuild, (Persistent(identity), 0, sizes, strides, False, no_hooks))
    untyped = known_global("torch.storage", "UntypedStorage")
    identity = ("storage", untyped, key, "cpu", num_elements * ITEM_BYTES[dtype])
    rebuild = known_global("torch._utils", "_rebuild_tensor_v3")
    return Call(rebuild, (Persistent(identity), 0, sizes, strides, False, no_hooks, known_global("torch", dtype)))


def _central_entry(label: bytes, num_bytes: int, crc: int, offset: int) -> bytes:
    wide = [value for value in (num_bytes, num_bytes, offset) if value >= MAX32]
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size = min(num_bytes, MAX32)
    version = 45 if wide else 0
    head = struct.pack("<HHHHHHIIIHHHHHII", version, version, _UTF8_FLAG, 0, 0, 0, crc, size, size,
                       len(label), len(extra), 0, 0, 0, 0, min(offset, MAX32))  # fmt: skip
    return CENTRAL + head + label + extra
