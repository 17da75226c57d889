"""Files of torch.save, read without running any of their pickles."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.checkpointing.contents import ITEM_BYTES, ChunkSpec, KeyPath, StoredChunk, sizes_of
from shardwise.checkpointing.pickles.machine import MAX_PICKLE_BYTES, Record, Symbol
from shardwise.checkpointing.pickles.torch_objects import DTensorRef, ShardedRef, TensorRef, read_torch_pickle
from shardwise.checkpointing.pickles.zip_files import LOCAL, ZipIndex
from shardwise.checkpointing.storage import files
from shardwise.checkpointing.storage.memory import BLOCK_BYTES, bytes_of, checksum, from_hex, to_hex
from shardwise.errors import CheckpointError

Ref = TensorRef | ShardedRef | DTensorRef
_TENSORS = (TensorRef, ShardedRef, DTensorRef)
_MAX_DEPTH = 64
_MAX_REVISITS = 200_000


@dataclass(slots=True)
class TorchState:
    """The leaves of a nested state dict, by flat name."""

    tensors: dict[str, Ref] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    """Plain values: numbers, text, bytes, None, NumPy's arrays, and lists, tuples, sets and dictionaries of them."""
    structure: dict[str, KeyPath] = field(default_factory=dict)
    """Flat name to the path it came from."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Flat name to the class of a value that is not plain data (an array of objects)."""


def flatten_state(tree: Any, *, where: str = "") -> TorchState:
    """Flatten what `read_torch_pickle` returned, with the names DCP would give.

    Dictionaries are always entered, lists where they hold a tensor or a dictionary; anything else is a leaf.

    Args:
        tree: A dictionary.
        where: The file, for messages.

    Raises:
        CheckpointError: It is not a dictionary, is nested without end, or two leaves get the same name.
    """
    if not isinstance(tree, Mapping):
        raise _not_a_state(where, f"it holds a {type(tree).__name__}, not a dictionary of tensors")
    flat = TorchState()
    walk = _Visited()
    for path, leaf in _leaves((), tree, walk, where):
        name = ".".join(map(str, path))
        if name in flat.structure:
            raise _not_a_state(where, f"two of its values are called {name}")
        flat.structure[name] = path
        if isinstance(leaf, _TENSORS):
            flat.tensors[name] = leaf
            continue
        try:
            flat.values[name] = _plain(leaf, walk, 0)
        except OpaqueValue as opaque:
            flat.left_out[name] = str(opaque)
            del flat.structure[name]
    return flat


def plain_value(value: Any) -> Any:
    """What `read_torch_pickle` returned, if it is plain data.

    Raises:
        OpaqueValue: It holds an object of some class, or a tensor.
    """
    return _plain(value, _Visited(), 0)


class _Visited:
    """Containers seen on one walk: a pickle may share them, so that a small one can hold endless paths."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._revisits = 0
        self._without_tensors: set[int] = set()

    def is_endless(self, container: Any, depth: int) -> bool:
        """Whether this container, met at this depth, shows that the walk would not end."""
        if id(container) in self._seen:
            self._revisits += 1
        self._seen.add(id(container))
        return depth > _MAX_DEPTH or self._revisits > _MAX_REVISITS

    def is_entered(self, value: Any) -> bool:
        """Whether DCP gives the items of a list names of their own: where a tensor or dictionary is among them."""
        if not isinstance(value, (list, tuple)) or id(value) in self._without_tensors:
            return False
        self._without_tensors.add(id(value))  # also for a list that holds itself
        entered = any(
            isinstance(entry, (*_TENSORS, Mapping)) or (isinstance(entry, list) and self.is_entered(entry))
            for entry in value
        )
        if entered:
            self._without_tensors.discard(id(value))
        return entered


def _leaves(path: KeyPath, value: Any, walk: _Visited, where: str) -> Iterator[tuple[KeyPath, Any]]:
    is_mapping = isinstance(value, Mapping)
    if not is_mapping and not walk.is_entered(value):
        yield path, value
        return
    if walk.is_endless(value, len(path)):
        raise _not_a_state(where, "it is nested without end")
    for key, entry in value.items() if is_mapping else enumerate(value):
        yield from _leaves((*path, _key(key) if is_mapping else key), entry, walk, where)


def _key(key: Any) -> str:
    return key.name if isinstance(key, Symbol) else str(key) if isinstance(key, (str, int, float)) else repr(key)


class OpaqueValue(Exception):
    """The name of a class whose objects are not plain data."""


def _plain(value: Any, walk: _Visited, depth: int) -> Any:
    if value is None or isinstance(value, (str, int, float, complex, bytes)):
        return value
    if isinstance(value, Symbol):
        return value.name
    if walk.is_endless(value, depth):
        raise OpaqueValue("a value nested without end")
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(_plain(entry, walk, depth + 1) for entry in value)
    if isinstance(value, dict):
        return {_plain(key, walk, depth + 1): _plain(entry, walk, depth + 1) for key, entry in value.items()}
    if isinstance(value, Record) and value.name == "argparse.Namespace":
        return _plain(value.fields, walk, depth + 1)
    if isinstance(value, Record) and value.name.startswith("numpy."):
        return _numpy_value(value)
    raise OpaqueValue(value.name if isinstance(value, Record) else type(value).__name__)


def _numpy_value(value: Record) -> Any:
    """The array or scalar whose bytes a pickle holds.

    Raises:
        OpaqueValue: It is another object of NumPy, or holds Python objects.
    """
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
    """The record's data.

    Args:
        pickled: `data.pkl`.
        storages: Checksums of the blocks of each storage, by its key.
    """
    hexadecimal = {key: to_hex(blocks) for key, blocks in storages.items()}
    ours = {"block_bytes": BLOCK_BYTES, "pickle": to_hex([checksum(pickled)]), "xxh3": hexadecimal}
    return json.dumps(ours, separators=(",", ":")).encode()


def _read_checksums(index: ZipIndex, pickled: bytes) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Bytes under one checksum, and the checksums of each storage by its key; 0 and none in files of others.

    Raises:
        ValueError: The record is damaged, or the pickle does not have its checksum.
    """
    if RECORD not in index.records:
        return 0, {}
    ours = json.loads(index.read_record(RECORD, _MAX_BYTES))
    block_bytes = ours["block_bytes"]
    if not isinstance(block_bytes, int) or not 1 << 10 <= block_bytes <= 1 << 30:
        raise ValueError("strange block size")
    checksums = {key: from_hex(text) for key, text in ours["xxh3"].items()}
    for key, blocks in checksums.items():
        if len(blocks) != -(-index.locate(f"data/{key}")[1] // block_bytes):
            raise ValueError(f"record data/{key} does not have a checksum for each of its blocks")
    if (checksum(pickled),) != from_hex(ours["pickle"]):
        raise ValueError("its pickle does not have its checksum")
    return block_bytes, checksums


_MAX_COPIED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A `torch.save` file, read as far as its pickle."""

    place: files.Place
    state: TorchState
    storages: Mapping[str, tuple[int, int]]
    """Storage key to the byte of the file at which it starts, and its bytes."""
    num_bytes: int
    archive: str = ""
    """What the file was called when it was written, without its ending."""
    block_bytes: int = 0
    """Bytes under one checksum; 0: the file has none."""
    checksums: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of the blocks of each storage, by its key."""

    @property
    def name(self) -> str:
        """In its folder."""
        return files.split(self.place)[1]

    def chunk(self, tensor: TensorRef, spec: ChunkSpec) -> StoredChunk:
        """The tensor's elements as the chunk `spec` of a larger tensor.

        Raises:
            CheckpointError: The file does not hold its storage, or not all of it.
        """
        storage = tensor.storage
        start, stored_bytes = self.storages.get(storage.key, (0, -1))
        if stored_bytes < storage.num_bytes:
            why = f"a tensor needs {storage.num_bytes:,} bytes, the file has {max(stored_bytes, 0):,}"
            raise files.damaged(f"the storage {storage.key[:40]!r} is missing or cut short", self.place, why)
        if not tensor.is_contiguous:
            return StoredChunk(spec, data=self._in_order(tensor, start))
        offset, num_bytes = tensor.offset * ITEM_BYTES[tensor.dtype], spec.numel * ITEM_BYTES[tensor.dtype]
        is_whole = offset == 0 and num_bytes == stored_bytes
        return StoredChunk(spec, self.name, start + offset, self.checksums.get(storage.key, ()) if is_whole else ())

    def _in_order(self, tensor: TensorRef, start: int) -> memoryview:
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
        with files.FileReader(self.place) as reader:
            reader.read_into(start, [memoryview(data)])
        flat = torch.frombuffer(data, dtype=getattr(torch, tensor.dtype))
        return bytes_of(flat.as_strided(tensor.shape, tensor.strides, tensor.offset).contiguous())


def is_torch_file(place: files.Place) -> bool:
    """Whether a file begins like one that `torch.save` writes."""
    if (files.size_of(place) or 0) < len(LOCAL):
        return False
    with files.FileReader(place) as reader:
        return reader.read(0, len(LOCAL)) == LOCAL


def read_torch_file(path: str | files.Place) -> TorchFile:
    """Read a `torch.save` file as far as its pickle.

    Args:
        path: The file.

    Raises:
        CheckpointError: It is missing, damaged, of an old kind, or names something no checkpoint needs.
    """
    place = files.place(path)
    where = str(place)
    size = files.size_of(place)
    if size is None:
        raise CheckpointError("there is no such file", where=where, fix="check the path")
    if not is_torch_file(place):
        raise CheckpointError(
            "this is not a file that torch.save writes",
            where=where,
            why="such a file is a zip archive since torch 1.6; older ones, and plain pickles, are not read",
            fix="load it with the program that wrote it and save it anew with torch.save or safetensors",
        )
    with files.FileReader(place) as reader:
        index = ZipIndex(reader.read, size, where=where)
        if "byteorder" in index.records and index.read_record("byteorder", 16) != b"little":
            raise CheckpointError(
                "the file was written on a machine with the other byte order",
                where=where,
                why="its numbers would be read backwards",
                fix="load it with torch.load there or here, and save it anew",
            )
        pickled = index.read_record("data.pkl", MAX_PICKLE_BYTES)
        try:
            block_bytes, checksums = _read_checksums(index, pickled)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise files.damaged("the file is damaged", where, f"its checksums cannot be used: {error}") from None
        state = flatten_state(read_torch_pickle(pickled, where=where), where=where)
        storages = {
            name.removeprefix("data/"): index.locate(name) for name in index.records if name.startswith("data/")
        }
    return TorchFile(place, state, storages, size, index.archive, block_bytes, checksums)
