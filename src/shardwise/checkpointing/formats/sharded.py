"""Our own format: one file a rank, a manifest with every checksum, and DCP's metadata beside it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import xxhash

from shardwise.checkpointing.contents import ITEM_BYTES, Box, Contents, Piece, StoredTensor
from shardwise.checkpointing.formats.values import decode_value
from shardwise.checkpointing.pickles.zip_files import Call, Instance, Pairs, dumps, known_global, tensor_frame
from shardwise.checkpointing.storage.files import Place, Writer, check_name, create, join, read_small, split
from shardwise.checkpointing.storage.memory import BLOCK_BYTES, bytes_of, checksum, counting, from_hex, to_hex
from shardwise.errors import CheckpointError
from shardwise.progress import Progress

_BATCH_BYTES = 8 << 20
_BATCH_BUFFERS = 512


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
    with contextlib.closing(create(path)) as writer:
        with counting(progress, total or 0, "writing") as count:
            _write(writer, layout.buffers(items, values or {}), count)
        if fsync:
            writer.sync()
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


def _write(writer: Writer, buffers: Iterator[memoryview | bytes], count: Callable[[int], None]) -> None:
    """Hand the buffers on in batches, of which each is one system call."""
    batch: list[memoryview | bytes] = []
    for buffer in buffers:
        batch.append(buffer)
        if len(batch) >= _BATCH_BUFFERS or sum(map(len, batch)) >= _BATCH_BYTES:
            writer.append(batch)
            count(sum(map(len, batch)))
            batch.clear()
    writer.append(batch)
    count(sum(map(len, batch)))


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


METADATA_NAME = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_DCP_VERSION = "1.0.0"


def torch_metadata(
    records: Iterable[FileRecord],
    *,
    aliases: Mapping[str, str],
    structure: Mapping[str, tuple[str | int, ...]],
) -> bytes:
    """The pickle of torch's `Metadata` for these files.

    Args:
        records: What each rank wrote.
        aliases: Further names of stored tensors (tied weights): they point at the same bytes.
        structure: Flat name to its path in the nested state dict.
    """
    pieces: dict[str, list[tuple[str, WrittenTensor]]] = {}
    entries: dict[str, Any] = {}
    places: list[tuple[Any, Any]] = []
    for record in records:
        for value in record.values:
            entries[value.name] = _instance("BytesStorageMetadata", {})
            places.append((_index(value.name, None, None), _place(record.file, value.item_offset, value.item_bytes)))
        for tensor in record.tensors:
            pieces.setdefault(tensor.name, []).append((record.file, tensor))
    names = {name: [name] for name in pieces}
    for alias, name in aliases.items():
        names[name].append(alias)
    for stored, parts in pieces.items():
        for name in names[stored]:
            entries[name] = _tensor_entry([part for _, part in parts])
            for number, (file, part) in enumerate(parts):
                index = _index(name, part.piece.box.starts, number)
                places.append((index, _place(file, part.item_offset, part.item_bytes)))
    state = {
        "state_dict_metadata": entries,
        "planner_data": {name: tuple(structure.get(name, (name,))) for name in entries},
        "storage_data": Pairs(tuple(places)),
        "storage_meta": None,
        "version": _DCP_VERSION,
    }
    return dumps(_instance("Metadata", state))


def _tensor_entry(parts: list[WrittenTensor]) -> Instance:
    chunks = [
        _instance(
            "ChunkStorageMetadata", {"offsets": _size(part.piece.box.starts), "sizes": _size(part.piece.box.sizes)}
        )
        for part in parts
    ]
    # What TensorProperties.__getstate__ gives: dtype, layout, requires_grad, memory format, pinned.
    layout = Call(known_global("torch.serialization", "_get_layout"), ("torch.strided",))
    memory_format = Call(known_global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    properties = (known_global("torch", parts[0].dtype), layout, False, memory_format, False)
    state = {"properties": _instance("TensorProperties", properties), "size": _size(parts[0].shape), "chunks": chunks}
    return _instance("TensorStorageMetadata", state)


def _index(name: str, starts: tuple[int, ...] | None, number: int | None) -> Instance:
    state = {"fqn": name, "index": number, **({} if starts is None else {"offset": _size(starts)})}
    return _instance("MetadataIndex", state)


def _place(file: str, offset: int, length: int) -> Instance:
    kind = known_global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    return Instance(kind, {"relative_path": file, "offset": offset, "length": length})


def _size(sizes: tuple[int, ...]) -> Call:
    return Call(known_global("torch", "Size"), (tuple(sizes),))


def _instance(name: str, state: Any) -> Instance:
    return Instance(known_global(_METADATA, name), state)


MANIFEST_NAME = "manifest.json"
FORMAT = "shardwise-sharded"
VERSION = 1
_MAX_BYTES = 1 << 30
_FIRST_LINE = re.compile(rb'\{"checksum": "([0-9a-f]{16})",\n')
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a manifest says besides where the bytes are."""

    step: int | None = None
    world_size: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    """By flat name, each as `values.encode_value` gives it."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of stored tensors (tied weights)."""
    structure: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    """Flat name to its path in the nested state dict."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """JSON: mesh axes, plans, versions, date, metric."""


def manifest_bytes(records: Iterable[FileRecord], header: Header, other_files: Mapping[str, bytes]) -> bytes:
    """The manifest, whose first line holds the checksum of all that follows.

    Args:
        records: What each rank wrote.
        header: The rest.
        other_files: Further files of the checkpoint with all their bytes; no tensor is in them.
    """
    records = list(records)
    block_bytes = {record.block_bytes for record in records} or {BLOCK_BYTES}
    if len(block_bytes) > 1:
        raise CheckpointError(f"the ranks used blocks of different sizes: {sorted(block_bytes)}")
    files = {record.file: {"bytes": record.num_bytes, "frame": to_hex([record.frame])} for record in records}
    files |= {name: {"bytes": len(data), "frame": to_hex([checksum(data)])} for name, data in other_files.items()}
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": header.step,
        "world_size": header.world_size,
        "block_bytes": block_bytes.pop(),
        "details": dict(header.details),
        "files": files,
        "values": dict(header.values),
        "aliases": dict(header.aliases),
        "structure": {name: list(path) for name, path in header.structure.items()},
        "tensors": _tensors(records),
    }
    if lost := {name for name in header.aliases.values() if name not in body["tensors"]}:
        raise CheckpointError(f"nothing was stored of {', '.join(sorted(lost))}, of which other names are aliases")
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    rest = text.removeprefix("{").encode("utf-8", "surrogatepass") + b"\n"
    return b'{"checksum": "' + to_hex([checksum(rest)]).encode() + b'",\n' + rest


def read_manifest(folder: Place) -> Contents:
    """Read a checkpoint's manifest, every field checked.

    Raises:
        CheckpointError: It is missing, damaged, or written by a later version.

    Ranks:
        Local.
    """
    path = join(folder, MANIFEST_NAME)
    data = read_small(path, _MAX_BYTES)
    where = str(path)
    line = _FIRST_LINE.match(data)
    if line is None or to_hex([checksum(memoryview(data)[line.end() :])]).encode() != line.group(1):
        raise _damaged(where, "its checksum is not that of its bytes")
    try:
        body = json.loads(b"{" + data[line.end() :])
        if body["format"] != FORMAT or body["version"] != VERSION:
            raise CheckpointError(
                f"the checkpoint has format {body['format']} version {body['version']}",
                where=where,
                why=f"this shardwise reads {FORMAT} version {VERSION}",
                fix="install the shardwise that wrote it, or a later one",
            )
        return _contents(folder, body, where)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(where, f"a field is missing or not what it should be: {error}") from None


def read_frames(folder: Place) -> dict[str, int]:
    """For every file the checksum of the bytes that belong to no tensor; read the manifest first."""
    data = read_small(join(folder, MANIFEST_NAME), _MAX_BYTES)
    return {name: from_hex(entry["frame"])[0] for name, entry in json.loads(data)["files"].items()}


def _tensors(records: list[FileRecord]) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for record in records:
        for part in record.tensors:
            entry = tensors.setdefault(part.name, {"dtype": part.dtype, "shape": list(part.shape), "pieces": []})
            if (entry["dtype"], entry["shape"]) != (part.dtype, list(part.shape)):
                raise CheckpointError(
                    f"the ranks do not agree on {part.name}: {part.dtype} {list(part.shape)} "
                    f"against {entry['dtype']} {entry['shape']}"
                )
            piece = part.piece
            entry["pieces"].append({
                "file": piece.file,
                "offset": piece.offset,
                "starts": list(piece.box.starts),
                "sizes": list(piece.box.sizes),
                "checksums": to_hex(piece.checksums),
            })  # fmt: skip
    return tensors


def _contents(folder: Place, body: Any, where: str) -> Contents:
    block_bytes = _number(body["block_bytes"], least=1)
    file_bytes = {check_name(name, where=where): _number(entry["bytes"]) for name, entry in body["files"].items()}
    tensors = {
        name: StoredTensor(name, _dtype(entry["dtype"]), _sizes(entry["shape"]), ())
        for name, entry in body["tensors"].items()
    }
    for name, tensor in tensors.items():
        pieces = [_piece(part, tensor, file_bytes, block_bytes) for part in body["tensors"][name]["pieces"]]
        tensors[name] = StoredTensor(name, tensor.dtype, tensor.shape, tuple(pieces))
    for alias, name in body["aliases"].items():
        stored = tensors[name]
        tensors[alias] = StoredTensor(alias, stored.dtype, stored.shape, stored.pieces)
    return Contents(
        path=folder,
        format="sharded",
        tensors=tensors,
        values={name: _value(name, value) for name, value in body["values"].items()},
        file_bytes=file_bytes,
        block_bytes=block_bytes,
        step=_optional(body["step"], _number),
        world_size=_optional(body["world_size"], _number),
        details={**body["details"], "aliases": body["aliases"]},
        structure={name: _path(path) for name, path in body["structure"].items()},
    )


def _piece(part: Any, tensor: StoredTensor, file_bytes: Mapping[str, int], block_bytes: int) -> Piece:
    box = Box(_sizes(part["starts"]), _sizes(part["sizes"]))
    offset, num_bytes = _number(part["offset"]), box.numel * ITEM_BYTES[tensor.dtype]
    sums = from_hex(part["checksums"])
    if not box.lies_in(tensor.shape):
        raise ValueError(f"{tensor.name}: a piece that lies outside the tensor")
    if offset + num_bytes > file_bytes[part["file"]]:
        raise ValueError(f"{tensor.name}: a piece that lies outside its file")
    if len(sums) != -(-num_bytes // block_bytes):
        raise ValueError(f"{tensor.name}: {len(sums)} checksums for {num_bytes} bytes")
    return Piece(box, part["file"], offset, sums)


def _value(name: str, encoded: Any) -> Any:
    try:
        return decode_value(encoded)
    except CheckpointError as error:
        raise ValueError(f"{name}: {error.what}") from None


def _path(parts: Any) -> tuple[str | int, ...]:
    if not isinstance(parts, list) or not all(type(part) in (str, int) for part in parts):
        raise ValueError(f"{parts!r:.60} is no path")
    return tuple(parts)


def _number(value: Any, *, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 62:
        raise ValueError(f"{value!r:.60} is no size")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{values!r:.60} is no shape")
    return tuple(map(_number, values))


def _dtype(name: Any) -> str:
    if name not in ITEM_BYTES:
        raise ValueError(f"{name!r:.60} is no dtype")
    return name


def _optional(value: Any, read: Callable[[Any], _T]) -> _T | None:
    return None if value is None else read(value)


def _damaged(where: str, why: str) -> CheckpointError:
    return CheckpointError(
        "the checkpoint's manifest is damaged",
        where=where,
        why=why,
        fix="load an older checkpoint, or copy this one again",
    )
