"""Files of torch.save: an index of their records, a streaming writer, and a reader that executes no pickle."""

from __future__ import annotations

import functools
import io
import json
import math
import pickle
import struct
import zipfile
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from shardwise.checkpointing import storage
from shardwise.checkpointing.contents import DTYPES, ITEM_BYTES, ChunkSpec, KeyPath, StoredChunk, sizes_of
from shardwise.checkpointing.pickles import machine
from shardwise.errors import CheckpointError

LOCAL, CENTRAL, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
END64, LOCATOR64 = b"PK\x06\x06", b"PK\x06\x07"
MAX32 = 0xFFFFFFFF
"""Value of a 32-bit field whose value is stored in a 64-bit field."""
_MAX_DIRECTORY_BYTES = 1 << 28
_ZIP_ERRORS = (OSError, ValueError, RuntimeError, EOFError, OverflowError, IndexError, struct.error)


class ZipIndex:
    """The directory of a zip stream; `read(offset, count)` returns bytes of the stream."""

    def __init__(self, read: Callable[[int, int], bytes], num_bytes: int, *, where: str) -> None:
        self._read, self._num_bytes, self.where = read, num_bytes, where
        self.records: dict[str, zipfile.ZipInfo] = {}
        """Records by name, without the archive's name."""
        self.archive = ""
        """The archive's name: torch uses the name of the written file without its suffix."""
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
        """Return all bytes of a small record."""
        offset, size = self.locate(name)
        if size > limit:
            raise self._damaged(f"its record {name} has {size:,} bytes, more than {limit:,}")
        return self._read(offset, size)

    def locate(self, name: str) -> tuple[int, int]:
        """Return the offset of a record's data in the stream, and its size."""
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
        return storage.damaged("the file is not a torch.save file, or a damaged one", self.where, why)


class _Stream(io.BytesIO):
    """File-like access to a stream; reads bytes on demand, and limits the size of a read."""

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
    """A class or function, identified by name."""

    module: str
    name: str


known_global = functools.cache(Global)
"""Cached, so that a pickle contains each name once."""


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """The result of calling a function with these arguments when the pickle is read."""

    function: Global
    arguments: tuple[Any, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Instance:
    """An object created without `__init__`, with this state."""

    kind: Global
    state: Any


@dataclass(frozen=True, slots=True)
class Persistent:
    """An object outside the pickle, by its persistent id: for torch, a storage."""

    identity: tuple[Any, ...]


def dumps(value: Any) -> bytes:
    """Pickle plain values, containers of them, and this module's classes; raise for anything else."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2, fix_imports=False).dump(value)
    return buffer.getvalue()


# The pickler in Python, which can write names of modules that are not installed; type stubs know only the C one.
_PythonPickler: Any = vars(pickle)["_Pickler"]


class _Pickler(_PythonPickler):
    """Python's pickler for plain values; classes and functions are written by name, and need not exist."""

    def reducer_override(self, obj: Any) -> Any:
        """Raise for other types: reading them would run code."""
        # By exact type: an IntEnum or a str subclass would be read as another type.
        if type(obj) in self.dispatch:
            return NotImplemented
        raise CheckpointError(
            f"cannot store a value of type {type(obj).__module__}.{type(obj).__qualname__}",
            why="a checkpoint holds tensors and plain Python values only, so that reading one runs no code",
            fix="turn it into numbers, text, lists, dictionaries or tensors in your state_dict()",
        )

    def persistent_id(self, obj: Any) -> Any:
        """Return the persistent id of a storage."""
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

    def _save_bytes(self, value: bytes) -> None:
        self._save_call(Call(known_global("_codecs", "encode"), (value.decode("latin1"), "latin1")))

    def _save_set(self, value: set[Any]) -> None:
        self._save_call(Call(known_global("builtins", "set"), (list(value),)))

    dispatch: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        kind: _PythonPickler.dispatch[kind] for kind in (type(None), bool, int, float, str, tuple, list, dict)
    }
    dispatch |= {Global: _save_global, Call: _save_call, Instance: _save_instance}
    dispatch |= {bytes: _save_bytes, set: _save_set}
    dispatch |= dict.fromkeys((Counter, OrderedDict, defaultdict), _PythonPickler.dispatch[dict])  # as dictionaries


_PREFIX = "archive/"
_SMALL_ALIGNMENT = 64  # as in torch.save
_LARGE_ALIGNMENT = 4096  # whole pages: the kernel copies them faster
_LARGE_BYTES = 1 << 18
_UTF8_FLAG = 0x800


class ZipStream:
    """Builds a `torch.save` stream record by record; the caller writes the result of each call, in the order of calls.

    `start` is the offset of the stream in its file; only the alignment of records depends on it.
    """

    def __init__(self, start: int = 0) -> None:
        self._start = start
        self._entries: list[tuple[bytes, int, int, int]] = []  # name, size, CRC, header offset
        self.num_bytes = 0
        """Bytes of the stream so far."""

    def record(self, name: str, num_bytes: int, *, crc: int = 0) -> bytes:
        """Return the header of a record; `num_bytes` of data must follow.

        torch never verifies CRCs. The CRC of tensor data would have to be known before the header is written, so it is
        0: `torch.load` accepts this, `unzip` does not.
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
        """Return a small record with its header."""
        return self.record(name, len(data), crc=zlib.crc32(data)) + data

    def opening(self, pickled: bytes) -> bytes:
        """Return the records of every stream, with the pickle of the saved object."""
        parts = {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n"}
        return b"".join(self.whole(name, data) for name, data in parts.items())

    def close(self) -> bytes:
        """Return the directory, which ends the stream."""
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
    """Return the bytes before and after a tensor's row-major bytes in a `torch.save` stream."""
    stream = ZipStream(start)
    head = stream.opening(dumps(tensor_call(dtype, shape, "0")))
    head += stream.record("data/0", math.prod(shape) * ITEM_BYTES[dtype])
    return head, stream.close()


def value_stream(value: Any) -> bytes:
    """Return the `torch.save` stream of a plain value."""
    stream = ZipStream()
    head = stream.opening(dumps(value))
    return head + stream.close()


def tensor_call(dtype: str, shape: Sequence[int], key: str) -> Call:
    """Return the call that rebuilds the contiguous tensor stored in the record `data/<key>`."""
    sizes, num_elements = tuple(shape), math.prod(shape)
    strides = tuple(math.prod(max(size, 1) for size in sizes[dim + 1 :]) for dim in range(len(sizes)))
    no_hooks = Call(known_global("collections", "OrderedDict"), ())
    if storage := DTYPES[dtype][2]:  # others: an untyped storage and the dtype
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


Ref = machine.TensorRef | machine.ShardedRef | machine.DTensorRef
_TENSORS = (machine.TensorRef, machine.ShardedRef, machine.DTensorRef)
_MAX_DEPTH = 64
_MAX_CONTAINERS = 1 << 20


@dataclass(slots=True)
class TorchState:
    """The leaves of a nested state dict by flat name."""

    tensors: dict[str, Ref] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    """Plain values: numbers, text, bytes, None, NumPy's arrays, and lists, tuples, sets and dictionaries of them."""
    structure: dict[str, KeyPath] = field(default_factory=dict)
    """Path of keys by flat name."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Class of each omitted value that is not plain data (an array of objects), by flat name."""


def flatten_state(tree: Any, *, where: str = "") -> TorchState:
    """Flatten a result of `read_torch_pickle`, with the same names as DCP.

    Dictionaries are always flattened, lists only if they contain a tensor or a dictionary; anything else is a leaf.
    """
    if not isinstance(tree, Mapping):
        raise _not_a_state(where, f"it holds a {type(tree).__name__}, not a dictionary of tensors")
    flat = TorchState()
    walk = _Walk()
    for path, leaf in _leaves((), tree, walk, where):
        name = ".".join(map(str, path))
        if name in flat.structure:
            raise _not_a_state(where, f"two of its values are called {name}")
        flat.structure[name] = path
        if isinstance(leaf, _TENSORS):
            flat.tensors[name] = leaf
            continue
        try:
            flat.values[name] = plain_value(leaf, walk, 0)
        except OpaqueValue as opaque:
            flat.left_out[name] = str(opaque)
            del flat.structure[name]
    return flat


class _Walk:
    """Counts visited containers: containers may be shared, so a small pickle can have an unlimited number of paths."""

    def __init__(self) -> None:
        self._left = _MAX_CONTAINERS

    def is_endless(self, depth: int) -> bool:
        """Whether the depth or the number of visited containers exceeds the limit."""
        self._left -= 1
        return depth > _MAX_DEPTH or self._left < 0

    def is_entered(self, value: Any, depth: int = 0) -> bool:
        """Whether DCP flattens this list: it contains a tensor or a dictionary."""
        if not isinstance(value, (list, tuple)) or self.is_endless(depth):
            return False
        return any(
            isinstance(entry, (*_TENSORS, Mapping)) or (isinstance(entry, list) and self.is_entered(entry, depth + 1))
            for entry in value
        )


def _leaves(path: KeyPath, value: Any, walk: _Walk, where: str) -> Iterator[tuple[KeyPath, Any]]:
    is_mapping = isinstance(value, Mapping)
    if not is_mapping and not walk.is_entered(value):
        yield path, value
        return
    if walk.is_endless(len(path)):
        raise _not_a_state(where, "it is nested without end")
    for key, entry in value.items() if is_mapping else enumerate(value):
        yield from _leaves((*path, _key(key) if is_mapping else key), entry, walk, where)


def _key(key: Any) -> str:
    return (
        key.name if isinstance(key, machine.Symbol) else str(key) if isinstance(key, (str, int, float)) else repr(key)
    )


class OpaqueValue(Exception):
    """Raised for a value that is not plain data; the message is the name of its class."""


def plain_value(value: Any, walk: _Walk | None = None, depth: int = 0) -> Any:
    """Return a result of `read_torch_pickle` as plain data; raise OpaqueValue if it is not."""
    walk = walk or _Walk()
    if value is None or isinstance(value, (str, int, float, complex, bytes)):
        return value
    if isinstance(value, machine.Symbol):
        return value.name
    if walk.is_endless(depth):
        raise OpaqueValue("a value nested without end")
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(plain_value(entry, walk, depth + 1) for entry in value)
    if isinstance(value, dict):
        return {plain_value(key, walk, depth + 1): plain_value(entry, walk, depth + 1) for key, entry in value.items()}
    if isinstance(value, machine.Record) and value.name == "argparse.Namespace":
        return plain_value(value.fields, walk, depth + 1)
    if isinstance(value, machine.Record) and value.name.startswith("numpy."):
        return _numpy_value(value)
    raise OpaqueValue(value.name if isinstance(value, machine.Record) else type(value).__name__)


def _numpy_value(value: machine.Record) -> Any:
    """Return the array or scalar stored in a pickle; raise OpaqueValue for other NumPy objects."""
    try:
        import numpy

        is_array = value.name.endswith("multiarray._reconstruct")
        if not is_array and not value.name.endswith("multiarray.scalar"):
            raise OpaqueValue(value.name)
        shape, dtype, is_fortran, data = value.state[1:] if is_array else ((), value.args[0], False, value.args[1])
        kind = numpy.dtype(dtype.args[0]).newbyteorder(dtype.state[1])
        if kind.kind not in "biufcSU" or not isinstance(data, bytes):
            raise OpaqueValue(f"{value.name} of {dtype.args[0]}")
        array = numpy.frombuffer(data, kind).reshape(sizes_of(shape), order="F" if is_fortran else "C").copy()
    except (ImportError, ValueError, TypeError, IndexError, AttributeError):
        raise OpaqueValue(value.name) from None
    return array if is_array else array[()]


def _not_a_state(where: str, why: str) -> CheckpointError:
    return CheckpointError(
        "the file is not a state dict",
        where=where,
        why=why,
        fix="save a dictionary of tensors, such as model.state_dict(), and read that",
    )


RECORD = "shardwise.json"
_MAX_BYTES = 1 << 28


def checksum_record(pickled: bytes, storages: Mapping[str, Iterable[int]]) -> bytes:
    """Return the content of the checksum record: checksums of the pickle, and of each storage's blocks by key."""
    hexadecimal = {key: storage.to_hex(blocks) for key, blocks in storages.items()}
    ours = {
        "block_bytes": storage.BLOCK_BYTES,
        "pickle": storage.to_hex([storage.checksum(pickled)]),
        "xxh3": hexadecimal,
    }
    return json.dumps(ours, separators=(",", ":")).encode()


def _read_checksums(index: ZipIndex, pickled: bytes) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Return the bytes per checksum, and the checksums of each storage by key; 0 and empty for files without them."""
    if RECORD not in index.records:
        return 0, {}
    ours = json.loads(index.read_record(RECORD, _MAX_BYTES))
    block_bytes = ours["block_bytes"]
    if not isinstance(block_bytes, int) or not 1 << 10 <= block_bytes <= 1 << 30:
        raise ValueError("invalid block size")
    checksums = {key: storage.from_hex(text) for key, text in ours["xxh3"].items()}
    for key, blocks in checksums.items():
        if len(blocks) != -(-index.locate(f"data/{key}")[1] // block_bytes):
            raise ValueError(f"record data/{key} does not have a checksum for each of its blocks")
    if (storage.checksum(pickled),) != storage.from_hex(ours["pickle"]):
        raise ValueError("the checksum of its pickle does not match")
    return block_bytes, checksums


_MAX_COPIED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class TorchFile:
    """The index and the pickle of a `torch.save` file, without the tensors' bytes."""

    place: storage.Place
    state: TorchState
    storages: Mapping[str, tuple[int, int]]
    """Offset in the file and number of bytes of each storage, by key."""
    num_bytes: int
    archive: str = ""
    """Name of the file when it was written, without its suffix."""
    block_bytes: int = 0
    """Bytes per checksum; 0: the file has no checksums."""
    checksums: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Checksums of each storage's blocks, by key."""

    @property
    def name(self) -> str:
        """Name of the file in its folder."""
        return storage.split(self.place)[1]

    def chunk(self, tensor: machine.TensorRef, spec: ChunkSpec) -> StoredChunk:
        """Return the tensor's elements as the chunk `spec` of a larger tensor."""
        wanted = tensor.storage
        start, stored_bytes = self.storages.get(wanted.key, (0, -1))
        if stored_bytes < wanted.num_bytes:
            why = f"a tensor needs {wanted.num_bytes:,} bytes, the file has {max(stored_bytes, 0):,}"
            raise storage.damaged(f"the storage {wanted.key[:40]!r} is missing or cut short", self.place, why)
        if not tensor.is_contiguous:
            return StoredChunk(spec, data=self._in_order(tensor, start))
        offset, num_bytes = tensor.offset * ITEM_BYTES[tensor.dtype], spec.numel * ITEM_BYTES[tensor.dtype]
        is_whole = offset == 0 and num_bytes == stored_bytes
        return StoredChunk(spec, self.name, start + offset, self.checksums.get(wanted.key, ()) if is_whole else ())

    def _in_order(self, tensor: machine.TensorRef, start: int) -> memoryview:
        import torch

        num_bytes = math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        if num_bytes > max(tensor.storage.num_bytes, _MAX_COPIED_BYTES):
            raise CheckpointError(
                f"a tensor of {num_bytes:,} bytes is an expanded view of {tensor.storage.num_bytes:,}",
                where=str(self.place),
                why="expanding it could fill the memory",
                fix="save a contiguous copy: tensor.contiguous()",
            )
        data = bytearray(tensor.storage.num_bytes)
        with storage.FileReader(self.place) as reader:
            reader.read_into(start, [memoryview(data)])
        flat = torch.frombuffer(data, dtype=getattr(torch, tensor.dtype))
        return storage.bytes_of(flat.as_strided(tensor.shape, tensor.strides, tensor.offset).contiguous())


def is_torch_file(place: storage.Place) -> bool:
    """Whether a file starts with the signature of `torch.save` files."""
    if (storage.size_of(place) or 0) < len(LOCAL):
        return False
    with storage.FileReader(place) as reader:
        return reader.read(0, len(LOCAL)) == LOCAL


def read_torch_file(path: str | storage.Place) -> TorchFile:
    """Read the index and the pickle of a `torch.save` file."""
    place = storage.place(path)
    where = str(place)
    size = storage.size_of(place)
    if size is None:
        raise CheckpointError("there is no such file", where=where, fix="check the path")
    if not is_torch_file(place):
        raise CheckpointError(
            "this is not a file of torch.save",
            where=where,
            why="these files are zip archives since torch 1.6; older ones and plain pickles are not supported",
            fix="load it with the program that wrote it and save it again with torch.save or safetensors",
        )
    with storage.FileReader(place) as reader:
        index = ZipIndex(reader.read, size, where=where)
        if "byteorder" in index.records and index.read_record("byteorder", 16) != b"little":
            raise CheckpointError(
                "the file was written on a machine with the other byte order",
                where=where,
                why="its numbers would be misread",
                fix="load it with torch.load there or here, and save it again",
            )
        pickled = index.read_record("data.pkl", machine.MAX_PICKLE_BYTES)
        with storage.parsing("the file is damaged: its checksums cannot be used", where):
            block_bytes, checksums = _read_checksums(index, pickled)
        state = flatten_state(machine.read_torch_pickle(pickled, where=where), where=where)
        storages = {
            name.removeprefix("data/"): index.locate(name) for name in index.records if name.startswith("data/")
        }
    return TorchFile(place, state, storages, size, index.archive, block_bytes, checksums)
