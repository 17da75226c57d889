"""The sharded format: one file per rank, a manifest with checksums, and DCP's metadata; committed by a rename."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import xxhash

from shardwise.checkpointing import storage
from shardwise.checkpointing.contents import (
    ITEM_BYTES,
    ChunkSpec,
    Contents,
    KeyPath,
    LocalChunk,
    StoredChunk,
    StoredTensor,
    TorchStream,
    count_of,
    sizes_of,
)
from shardwise.checkpointing.formats.values import decode_value
from shardwise.checkpointing.pickles import torch_files
from shardwise.errors import CheckpointError, listed, raise_listed
from shardwise.progress import Progress

METADATA_NAME, MANIFEST_NAME = ".metadata", "manifest.json"
FORMAT, VERSION = "shardwise-sharded", 1
_MAX_BYTES = 1 << 30
_DAMAGED = "the checkpoint's manifest is damaged"
_log = logging.getLogger("shardwise.checkpointing")
_START = b'{"checksum": "'
_FIRST_LINE = re.compile(rb'\{"checksum": "([0-9a-f]{16})",\n')
_FIRST_LINE_BYTES = 33
_METADATA = "torch.distributed.checkpoint.metadata"
_DCP_VERSION = "1.0.0"
_STEP = re.compile(r"step-(\d{8,})")
_DATA_FILE = re.compile(r"__\d+_0\.distcp")
_REWOUND = re.compile(r"rewound-(\d{8,})")
_PARTIAL, _REMOVING, _ABANDONED = ".partial", ".removing", ".abandoned"
_MARK = ".unfinished"
"""Marker file in object stores, which have no partial folders: the checkpoint is being written or removed."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Description of one rank's file for the manifest and torch's metadata. Picklable."""

    file: str
    num_bytes: int
    frame: int
    """Checksum of all bytes outside tensors, in order."""
    tensors: tuple[tuple[StoredTensor, TorchStream], ...]
    """Each tensor with its chunk in this file, and the chunk's stream for torch's readers."""
    values: tuple[TorchStream, ...]
    """Streams of plain values for torch's readers; shardwise reads values from the manifest."""
    block_bytes: int


def value_streams(encoded: Mapping[str, Any]) -> dict[str, bytes]:
    """Return values as written by `torch.save`, for torch's readers; encoded if they are not plain values."""
    streams = {}
    for name, value in encoded.items():
        try:
            streams[name] = torch_files.value_stream(decode_value(value))
        except (CheckpointError, TypeError, ImportError):
            streams[name] = torch_files.value_stream(value)
    return streams


def file_name(rank: int) -> str:
    """Return the name of a rank's file, as in `torch.distributed.checkpoint`."""
    return f"__{rank}_0.distcp"


def write_rank_file(
    path: storage.Place,
    items: Iterable[LocalChunk],
    values: Mapping[str, bytes] | None = None,
    *,
    fsync: bool = True,
    block_bytes: int = storage.BLOCK_BYTES,
    total: int = 0,
    progress: Progress | None = None,
) -> FileRecord:
    """Write a new file with these tensors, and values from `value_streams`, in the partial folder.

    `items` may be a generator that creates each item's memory on demand; `total` is then the number of bytes of all.
    """
    if isinstance(items, Sequence):
        total = sum(item.num_bytes for item in items)
    file, frame = storage.split(path)[1], xxhash.xxh3_64()
    tensors: list[tuple[StoredTensor, TorchStream]] = []
    streams: list[TorchStream] = []
    with storage.FileWriter(path) as writer:

        def put(data: bytes) -> None:
            frame.update(data)
            writer.append(data)

        for name, stream in (values or {}).items():
            streams.append(TorchStream(file, writer.num_bytes, len(stream), name))
            put(stream)
        with storage.counting(progress, total, "writing") as count:
            for item in items:
                start, data = writer.num_bytes, storage.bytes_of(item.memory)
                assert len(data) == item.num_bytes, f"{item.name}: {len(data)} bytes for {item.spec}"
                head, tail = torch_files.tensor_frame(item.dtype, item.spec.sizes, start=start)
                put(head)
                offset = writer.num_bytes
                checksums = writer.append_blocks([data], block_bytes)
                count(len(data))
                put(tail)
                chunk = StoredChunk(item.spec, file, offset, checksums)
                tensor = StoredTensor(item.name, item.dtype, item.shape, (chunk,))
                tensors.append((tensor, TorchStream(file, start, writer.num_bytes - start, item.name)))
        if fsync:
            writer.sync()
    return FileRecord(file, writer.num_bytes, frame.intdigest(), tuple(tensors), tuple(streams), block_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """Fields of a manifest, except the locations of bytes."""

    step: int | None = None
    world_size: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    """Encoded values (`values.encode_value`) by flat name."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of stored tensors by their other names (tied weights)."""
    structure: Mapping[str, KeyPath] = field(default_factory=dict)
    """Path in the nested state dict by flat name."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """JSON: mesh axes, plans, versions, date, metric."""


def parts_by_name(records: Iterable[FileRecord]) -> dict[str, list[tuple[StoredTensor, TorchStream]]]:
    """Return the chunks of all ranks by name of the tensor."""
    parts: dict[str, list[tuple[StoredTensor, TorchStream]]] = {}
    for record in records:
        for part in record.tensors:
            parts.setdefault(part[0].name, []).append(part)
    return parts


def torch_metadata(records: Sequence[FileRecord], header: Header) -> bytes:
    """Return the pickle of torch's `Metadata` for these files; other names of a tensor refer to the same bytes."""
    names: dict[str, list[str]] = {}
    for alias, name in header.aliases.items():
        names.setdefault(name, []).append(alias)
    entries: dict[str, Any] = {}
    places: dict[torch_files.Instance, torch_files.Instance] = {}
    for value in (value for record in records for value in record.values):
        entries[value.name] = _instance("BytesStorageMetadata", {})
        places[_instance("MetadataIndex", {"fqn": value.name, "index": None})] = _place(value)
    for stored, written in parts_by_name(records).items():
        for name in (stored, *names.get(stored, ())):
            entries[name] = _tensor_entry([tensor for tensor, _ in written])
            for number, (tensor, stream) in enumerate(written):
                index = {"fqn": name, "index": number, "offset": _size(tensor.chunks[0].spec.starts)}
                places[_instance("MetadataIndex", index)] = _place(stream)
    state = {
        "state_dict_metadata": entries,
        "planner_data": {name: tuple(header.structure.get(name, (name,))) for name in entries},
        "storage_data": places,
        "storage_meta": None,
        "version": _DCP_VERSION,
    }
    return torch_files.dumps(_instance("Metadata", state))


def _tensor_entry(parts: list[StoredTensor]) -> torch_files.Instance:
    specs = [part.chunks[0].spec for part in parts]
    chunks = [
        _instance("ChunkStorageMetadata", {"offsets": _size(spec.starts), "sizes": _size(spec.sizes)}) for spec in specs
    ]
    # The state of TensorProperties.__getstate__: dtype, layout, requires_grad, memory format, pinned.
    layout = torch_files.Call(torch_files.known_global("torch.serialization", "_get_layout"), ("torch.strided",))
    memory_format = torch_files.Call(torch_files.known_global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    properties = (torch_files.known_global("torch", parts[0].dtype), layout, False, memory_format, False)
    state = {"properties": _instance("TensorProperties", properties), "size": _size(parts[0].shape), "chunks": chunks}
    return _instance("TensorStorageMetadata", state)


def _place(stream: TorchStream) -> torch_files.Instance:
    kind = torch_files.known_global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    return torch_files.Instance(
        kind, {"relative_path": stream.file, "offset": stream.offset, "length": stream.num_bytes}
    )


def _size(sizes: tuple[int, ...]) -> torch_files.Call:
    return torch_files.Call(torch_files.known_global("torch", "Size"), (tuple(sizes),))


def _instance(name: str, state: Any) -> torch_files.Instance:
    return torch_files.Instance(torch_files.known_global(_METADATA, name), state)


def manifest_bytes(folder: storage.Place, records: Sequence[FileRecord], header: Header, metadata: bytes) -> bytes:
    """Return the manifest, whose first line has the checksum of the rest; raise unless all state was written."""
    parts = parts_by_name(records)
    written = {record.file: (record.num_bytes, record.frame) for record in records}
    written[METADATA_NAME] = (len(metadata), storage.checksum(metadata))
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": header.step,
        "world_size": header.world_size,
        "block_bytes": next((record.block_bytes for record in records), storage.BLOCK_BYTES),
        "details": dict(header.details),
        "files": {file: {"bytes": size, "frame": storage.to_hex([frame])} for file, (size, frame) in written.items()},
        "values": dict(header.values),
        "aliases": dict(header.aliases),
        "structure": {name: list(path) for name, path in header.structure.items()},
        "tensors": {name: _entry([tensor for tensor, _ in of_ranks]) for name, of_ranks in parts.items()},
    }
    problems = [
        f"{name}: the ranks wrote different dtypes or shapes"
        for name, of_ranks in parts.items()
        if len({(tensor.dtype, tensor.shape) for tensor, _ in of_ranks}) > 1
    ]
    raise_listed(
        problems or _problems(_parsed(folder, body)),
        "{num} tensors or values would not be stored completely; nothing was committed",
        why=f"every element must be stored exactly once, or {folder} cannot be loaded",
        fix="report this bug with the text above: the ranks did not agree on the writers",
        kind=CheckpointError,
    )
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    rest = text.removeprefix("{").encode("utf-8", "surrogatepass") + b"\n"
    return b'{"checksum": "' + storage.to_hex([storage.checksum(rest)]).encode() + b'",\n' + rest


def _problems(contents: Contents) -> list[str]:
    """Return the tensors that are missing, incomplete or stored twice."""
    found = [(name, tensor.problem()) for name, tensor in contents.tensors.items()]
    lost = [name for name in contents.structure if name not in contents.tensors and name not in contents.values]
    return [f"{name}: {problem}" for name, problem in found if problem] + [
        f"{name}: no rank has written it" for name in lost
    ]


def read_manifest(folder: storage.Place) -> Contents:
    """Read a checkpoint's manifest and validate every field."""
    path = storage.join(folder, MANIFEST_NAME)
    data = storage.read_small(path, _MAX_BYTES)
    line = _FIRST_LINE.match(data)
    if line is None or storage.to_hex([storage.checksum(memoryview(data)[line.end() :])]).encode() != line.group(1):
        raise storage.damaged(_DAMAGED, path, "its checksum is not that of its bytes")
    with storage.parsing(_DAMAGED, path):
        return _parsed(folder, json.loads(b"{" + data[line.end() :]))


def _entry(parts: list[StoredTensor]) -> dict[str, Any]:
    """Return one tensor's entry in the manifest."""
    chunks = [
        {
            "file": chunk.file,
            "offset": chunk.offset,
            "starts": list(chunk.spec.starts),
            "sizes": list(chunk.spec.sizes),
            "checksums": storage.to_hex(chunk.checksums),
        }
        for part in parts
        for chunk in part.chunks
    ]
    return {"dtype": parts[0].dtype, "shape": list(parts[0].shape), "pieces": chunks}


def _parsed(folder: storage.Place, body: Any) -> Contents:
    """Return the contents that a manifest describes; validate every field."""
    where = str(storage.join(folder, MANIFEST_NAME))
    if body["format"] != FORMAT or body["version"] != VERSION:
        raise CheckpointError(
            f"the checkpoint has format {body['format']} version {body['version']}",
            where=where,
            why=f"this shardwise reads {FORMAT} version {VERSION}",
            fix="install the shardwise that wrote it, or a later one",
        )
    if (block_bytes := count_of(body["block_bytes"])) == 0:
        raise ValueError("block_bytes is 0")
    files = body["files"].items()
    file_bytes = {storage.check_name(name, where=where): count_of(entry["bytes"]) for name, entry in files}
    tensors = {name: _tensor(name, entry, file_bytes, block_bytes) for name, entry in body["tensors"].items()}
    for alias, name in body["aliases"].items():
        tensors[alias] = replace(tensors[name], name=alias)
    step, world_size = (None if body[key] is None else count_of(body[key]) for key in ("step", "world_size"))
    frames = {name: storage.from_hex(entry["frame"])[0] for name, entry in files}
    return Contents(
        path=folder,
        format="sharded",
        tensors=tensors,
        values={name: _value(name, value) for name, value in body["values"].items()},
        file_bytes=file_bytes,
        block_bytes=block_bytes,
        step=step,
        world_size=world_size,
        details={**body["details"], "aliases": body["aliases"], "frames": frames},
        structure={name: _path(path) for name, path in body["structure"].items()},
    )


def _tensor(name: str, entry: Any, file_bytes: Mapping[str, int], block_bytes: int) -> StoredTensor:
    dtype, item_bytes = entry["dtype"], ITEM_BYTES[entry["dtype"]]
    shape, chunks = sizes_of(entry["shape"]), []
    for part in entry["pieces"]:
        spec, sums = ChunkSpec(sizes_of(part["starts"]), sizes_of(part["sizes"])), storage.from_hex(part["checksums"])
        offset, num_bytes = count_of(part["offset"]), spec.numel * item_bytes
        if not spec.lies_in(shape):
            raise ValueError(f"{name}: a chunk that lies outside the tensor")
        if offset + num_bytes > file_bytes[part["file"]]:
            raise ValueError(f"{name}: a chunk that lies outside its file")
        if len(sums) != -(-num_bytes // block_bytes):
            raise ValueError(f"{name}: {len(sums)} checksums for {num_bytes} bytes")
        chunks.append(StoredChunk(spec, part["file"], offset, sums))
    return StoredTensor(name, dtype, shape, tuple(chunks))


def _value(name: str, encoded: Any) -> Any:
    try:
        return decode_value(encoded)
    except CheckpointError as error:
        raise ValueError(f"{name}: {error.what}") from None


def _path(parts: Any) -> KeyPath:
    if not isinstance(parts, list) or not all(type(part) in (str, int) for part in parts):
        raise ValueError(f"{parts!r:.60} is not a path")
    return tuple(parts)


def step_folder(root: str | storage.Place, step: int) -> storage.Place:
    """Return the path of a step's checkpoint under `root`."""
    return storage.join(storage.place(root), f"step-{step:08d}")


def partial_of(folder: storage.Place) -> storage.Place:
    """Return the path of an uncommitted checkpoint: a partial name; in an object store the final path."""
    return folder if isinstance(folder, str) else folder.with_name(folder.name + _PARTIAL)


def begin_checkpoint(folder: storage.Place) -> storage.Place:
    """Create the empty partial folder of the checkpoint `folder` and return it; call it on rank 0."""
    if is_committed(folder) or (isinstance(folder, Path) and storage.exists(folder)):
        raise CheckpointError(
            f"there is a checkpoint called {storage.split(folder)[1]} already",
            where=str(folder),
            why="a committed checkpoint is never overwritten",
            fix="save under another step or into another folder, or remove this one",
        )
    if isinstance(folder, str) and (names := storage.names_in(folder)) and not _is_unfinished(folder):
        raise CheckpointError(
            f"there are files that are not remains of an interrupted save: {listed(names)}",
            where=folder,
            why="a save removes only the remains of an interrupted save",
            fix="choose an empty folder, or remove the files",
        )
    discard_partial(folder)
    partial = partial_of(folder)
    storage.make_folder(partial)
    if isinstance(folder, str):
        storage.write_small(storage.join(folder, _MARK), b"")
    return partial


def discard_partial(folder: storage.Place) -> None:
    """Remove the files of a failed or interrupted save of the checkpoint; call it on rank 0."""
    if isinstance(folder, Path):
        storage.remove_tree(partial_of(folder))
    elif not is_committed(folder) and _is_unfinished(folder):
        _remove_marked(folder)


def commit_checkpoint(
    folder: storage.Place, records: Iterable[FileRecord], header: Header, *, fsync: bool = True
) -> None:
    """Commit the files in `partial_of(folder)`: metadata, manifest, sync, rename; call it on rank 0."""
    records = sorted(records, key=lambda record: record.file)
    partial = partial_of(folder)
    metadata = torch_metadata(records, header)
    manifest = manifest_bytes(folder, records, header, metadata)
    storage.write_small(storage.join(partial, METADATA_NAME), metadata, fsync=fsync)
    storage.write_small(storage.join(partial, MANIFEST_NAME), manifest, fsync=fsync)
    if isinstance(folder, str) or isinstance(partial, str):
        storage.remove_tree(storage.join(partial, _MARK))
        return
    if fsync:
        storage.sync_folder(partial)
    with storage.os_errors("give the checkpoint its name", folder):
        os.rename(partial, folder)
    if fsync:
        storage.sync_folder(folder.parent)
        with contextlib.suppress(CheckpointError):  # the run's folder may be new; its parent may not be readable
            storage.sync_folder(folder.parent.parent)


def is_committed(folder: storage.Place) -> bool:
    """Whether the path is a committed sharded checkpoint."""
    if isinstance(folder, str):
        return _manifest_state(folder) == "complete"
    if folder.name.endswith((_PARTIAL, _REMOVING)):
        return False
    return storage.size_of(folder / MANIFEST_NAME) is not None


def _manifest_state(folder: str) -> Literal["complete", "incomplete", "absent"]:
    """Whether a manifest in an object store is complete: its two lines contain its only newlines."""
    path = storage.join(folder, MANIFEST_NAME)
    size = storage.size_of(path)
    if size is None:
        return "absent"
    with storage.FileReader(path) as reader:
        head = reader.read(0, min(size, _FIRST_LINE_BYTES))
        end = reader.read(size - 1, 1) if size > _FIRST_LINE_BYTES else b""
    if _FIRST_LINE.match(head) and end == b"\n":
        return "complete"
    return "incomplete" if _START.startswith(head[: len(_START)]) else "absent"  # another program's file


def _is_unfinished(folder: str) -> bool:
    """Whether all files in this folder of an object store are from an interrupted save or removal."""
    names = storage.names_in(folder)
    is_ours = _MARK in names or _manifest_state(folder) == "incomplete"
    return is_ours and all(
        name in (_MARK, METADATA_NAME, MANIFEST_NAME) or _DATA_FILE.fullmatch(name) for name in names
    )


def _remove_marked(folder: str) -> None:
    """Remove a folder of an object store, the marker last, so that the rest stays marked if interrupted."""
    storage.remove_files(folder, [name for name in storage.names_in(folder) if name != _MARK])
    storage.remove_tree(folder)


def committed_steps(root: str | storage.Place) -> list[int]:
    """Return the steps of committed checkpoints under `root`, ascending, without abandoned ones."""
    root = storage.place(root)
    names = storage.names_in(root)
    last = min(_matched(_REWOUND, names), default=math.inf)
    committed = []
    for step in sorted(step for step in _matched(_STEP, names) if step <= last):
        folder = step_folder(root, step)
        if is_committed(folder):
            committed.append(step)
        elif isinstance(folder, str) and _manifest_state(folder) == "incomplete":
            _log.warning("%s is skipped: its manifest is incomplete, so its save was interrupted", folder)
    return committed


def rewind(root: storage.Place, step: int) -> list[storage.Place]:
    """Rename the checkpoints after `step`, and return their new paths; call it on rank 0, while no save runs.

    They are renamed one by one. A marker file, written first, abandons all of them atomically for `committed_steps`.
    """
    if committed_steps(root)[-1:] <= [step]:
        return []
    storage.write_small(storage.join(root, f"rewound-{step:08d}"), b"")
    storage.sync_folder(root)
    return finish_rewind(root)


def finish_rewind(root: storage.Place) -> list[storage.Place]:
    """Complete an interrupted `rewind`, and return the new paths; call it on rank 0, while no save runs."""
    names, moved = storage.names_in(root), []
    markers = [name for name in names if _REWOUND.fullmatch(name)]
    for step in _matched(_STEP, names) if markers else ():
        if step > min(_matched(_REWOUND, markers)):
            old = step_folder(root, step)
            folder, name = storage.split(old)
            suffixes = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))  # an earlier rewind
            free = (storage.join(folder, f"{name}{_ABANDONED}{suffix}") for suffix in suffixes)
            moved.append(next(place for place in free if not storage.exists(place)))
            storage.move(old, moved[-1])
    if moved:
        storage.sync_folder(root)
    for name in markers:
        storage.remove_tree(storage.join(root, name))
    return moved


def _matched(pattern: re.Pattern[str], names: Iterable[str]) -> list[int]:
    return [int(match.group(1)) for name in names if (match := pattern.fullmatch(name))]


def remove_checkpoint(folder: storage.Place) -> None:
    """Remove a checkpoint atomically; call it on rank 0."""
    if isinstance(folder, str):
        if storage.names_in(folder):
            storage.write_small(storage.join(folder, _MARK), b"")
            storage.remove_tree(storage.join(folder, MANIFEST_NAME))
            _remove_marked(folder)
    else:
        retired = folder.with_name(folder.name + _REMOVING)
        storage.remove_tree(retired)
        with storage.os_errors("remove the checkpoint", folder), contextlib.suppress(FileNotFoundError):
            os.rename(folder, retired)
        storage.remove_tree(retired)


def sweep(root: str | storage.Place) -> list[storage.Place]:
    """Remove and return the remains of interrupted saves and removals under `root`; on rank 0, while no save runs."""
    root = storage.place(root)
    finish_rewind(root)
    removed = []
    for name in storage.names_in(root):
        place, bare = storage.join(root, name), name.removesuffix(_PARTIAL).removesuffix(_REMOVING)
        if _STEP.fullmatch(bare) is None:
            continue
        if bare != name and isinstance(place, Path):
            storage.remove_tree(place)
        elif isinstance(place, str) and not is_committed(place) and _is_unfinished(place):
            _remove_marked(place)
        else:
            continue
        removed.append(place)
    return removed
