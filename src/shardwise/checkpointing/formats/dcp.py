"""Folders of torch.distributed.checkpoint, read without unpickling `.metadata`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.checkpointing import contents, storage
from shardwise.checkpointing.contents import ChunkSpec, Contents, KeyPath, StoredChunk, TorchStream, count_of, sizes_of
from shardwise.checkpointing.formats.sharded import MANIFEST_NAME, METADATA_NAME, read_manifest
from shardwise.checkpointing.pickles.machine import Record, TensorRef, dtype_name, read_torch_pickle
from shardwise.checkpointing.pickles.torch_files import OpaqueValue, TorchFile, TorchState, ZipIndex, plain_value
from shardwise.errors import CheckpointError

_MAX_PICKLE_BYTES = 64 << 20
_MAX_METADATA_BYTES = 1 << 30
_Tensors = dict[str, tuple[str, tuple[int, ...], dict[ChunkSpec, TorchStream]]]


def is_dcp(path: str | Path) -> bool:
    """Whether the folder is a Distributed Checkpoint, of shardwise or torch."""
    folder = storage.place(path)
    return any(storage.size_of(storage.join(folder, name)) is not None for name in (MANIFEST_NAME, METADATA_NAME))


def read_dcp(path: str | Path, subfolder: str = "") -> Contents:
    """Read the index of a Distributed Checkpoint folder, or of a `subfolder` (ending in `/`) of a folder.

    Values that are not plain data are omitted and listed in `details["left_out"]` with the reason.
    """
    folder = storage.place(path)
    if not subfolder and storage.size_of(storage.join(folder, MANIFEST_NAME)) is not None:
        return read_manifest(folder)
    place = storage.join(folder, subfolder + METADATA_NAME)
    data = storage.read_small(place, _MAX_METADATA_BYTES)
    metadata = read_torch_pickle(data, where=str(place), max_bytes=_MAX_METADATA_BYTES)
    with storage.parsing(f"{METADATA_NAME} is damaged and cannot be read", place):
        if not isinstance(metadata, Record) or not metadata.name.endswith(".Metadata"):
            raise ValueError("it is a pickle of another object")
        stored, plain = _entries(metadata.fields, subfolder)
        structure = _structure(metadata.fields.get("planner_data"))
    with _Items(folder) as items:
        tensors = {
            name: contents.StoredTensor(
                name, dtype, shape, tuple(items.chunk(dtype, *chunk) for chunk in chunks.items())
            )
            for name, (dtype, shape, chunks) in stored.items()
        }
        values, left_out = items.values(plain)
    streams = [*plain.values(), *(stream for _, _, chunks in stored.values() for stream in chunks.values())]
    version = metadata.fields.get("version")
    return Contents(
        path=folder,
        format="dcp",
        tensors=tensors,
        values=values,
        details={"dcp_version": version if isinstance(version, str) else None, "left_out": left_out},
        structure=structure,
        streams=tuple(sorted(streams, key=lambda stream: (stream.file, stream.offset))),
    )


def _entries(fields: Mapping[str, Any], subfolder: str) -> tuple[_Tensors, dict[str, TorchStream]]:
    """Return the locations of each tensor's chunks, and of each value."""
    streams = {}
    for index, info in (fields.get("storage_data") or {}).items():
        name, start, place = index.fields["fqn"], index.fields.get("offset"), info.fields
        if not isinstance(name, str) or not isinstance(place["relative_path"], str):
            raise ValueError(f"{name!r}: no place in a file")
        if place.get("transform_descriptors"):
            raise ValueError(f"{name} was stored through {place['transform_descriptors']}, which only torch can decode")
        file = subfolder + place["relative_path"]
        stream = TorchStream(file, count_of(place["offset"]), count_of(place["length"]), name)
        streams[name, None if start is None else sizes_of(start)] = stream
    tensors: _Tensors = {}
    values: dict[str, TorchStream] = {}
    for name, entry in fields["state_dict_metadata"].items():
        if entry.name.endswith("BytesStorageMetadata"):
            values[name] = _find(streams, name, None)
            continue
        properties, shape = entry.fields["properties"], sizes_of(entry.fields["size"])
        dtype = dtype_name(properties.state[0] if isinstance(properties.state, tuple) else properties.fields["dtype"])
        chunks = {}
        for chunk in entry.fields["chunks"]:
            spec = ChunkSpec(sizes_of(chunk.fields["offsets"]), sizes_of(chunk.fields["sizes"]))
            if not spec.lies_in(shape):
                raise ValueError(f"{name}: a chunk that lies outside the tensor")
            chunks[spec] = _find(streams, name, spec.starts)
        tensors[name] = (dtype, shape, chunks)
    return tensors, values


def _find(streams: Mapping[Any, TorchStream], name: Any, starts: tuple[int, ...] | None) -> TorchStream:
    if (stream := streams.get((name, starts))) is None:
        raise ValueError(f"it does not say where {name!r}, or a part of it, lies")
    return stream


def _structure(planner_data: Any) -> dict[str, KeyPath]:
    """Return DCP's mapping of flat names to paths; empty for folders written without flattening."""
    return {
        name: path
        for name, path in (planner_data if isinstance(planner_data, dict) else {}).items()
        if isinstance(name, str) and isinstance(path, tuple) and all(isinstance(part, (str, int)) for part in path)
    }


class _Items(contextlib.ExitStack):
    """Items in the files of a folder, which stay open."""

    def __init__(self, folder: storage.Place) -> None:
        super().__init__()
        self._folder = folder
        self._readers: dict[str, tuple[storage.FileReader, int]] = {}
        self._trees: dict[bytes, Any] = {}  # tensors of one shape and dtype have equal pickles

    def values(self, stored: Mapping[str, TorchStream]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return all plain values by name, and the reasons why others were omitted."""
        values: dict[str, Any] = {}
        left_out: dict[str, str] = {}
        for name, stream in stored.items():
            _, pickled = self._open(stream)
            try:
                values[name] = plain_value(self._tree(stream, pickled))
            except OpaqueValue as error:
                left_out[name] = f"the value is not plain data but holds {error}"
            except CheckpointError as error:
                left_out[name] = error.what
        return values, left_out

    def chunk(self, dtype: str, spec: ChunkSpec, stream: TorchStream) -> StoredChunk:
        """Return the location of a chunk's bytes."""
        index, pickled = self._open(stream)
        tree = self._tree(stream, pickled)
        if not isinstance(tree, TensorRef) or tree.dtype != dtype or tree.shape != spec.sizes:
            raise self._damaged(stream, f"it does not hold the {dtype} of shape {spec.sizes} that is {stream.name}")
        offset, num_bytes = index.locate(f"data/{tree.storage.key}")
        storages = {tree.storage.key: (stream.offset + offset, num_bytes)}
        file = TorchFile(storage.join(self._folder, stream.file), TorchState(), storages, num_bytes)
        chunk = file.chunk(tree, spec)
        return chunk if chunk.data is not None else replace(chunk, file=stream.file)

    def _open(self, stream: TorchStream) -> tuple[ZipIndex, bytes]:
        """Return the item's zip directory and its pickle."""
        path = storage.join(self._folder, stream.file)
        if stream.file not in self._readers:
            storage.check_name(stream.file, where=str(storage.join(self._folder, METADATA_NAME)))
            if (size := storage.size_of(path)) is None:
                raise storage.damaged("a file of the checkpoint is missing", path, f"{METADATA_NAME} names it")
            self._readers[stream.file] = (self.enter_context(storage.FileReader(path)), size)
        reader, size = self._readers[stream.file]
        if (end := stream.offset + stream.num_bytes) > size:
            raise self._damaged(stream, f"it ends at byte {size:,}, but {stream.name} at {end:,}")
        index = ZipIndex(
            lambda offset, count: reader.read(stream.offset + offset, count),
            stream.num_bytes,
            where=f"{path}, {stream.name}",
        )
        return index, index.read_record("data.pkl", _MAX_PICKLE_BYTES)

    def _tree(self, stream: TorchStream, pickled: bytes) -> Any:
        if pickled not in self._trees:
            where = f"{storage.join(self._folder, stream.file)}, {stream.name}"
            self._trees[pickled] = read_torch_pickle(pickled, where=where)
        return self._trees[pickled]

    def _damaged(self, stream: TorchStream, why: str) -> CheckpointError:
        return storage.damaged("the checkpoint is damaged", storage.join(self._folder, stream.file), why)
