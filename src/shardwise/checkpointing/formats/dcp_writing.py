"""Write the `.metadata` by which `torch.distributed.checkpoint` reads our files. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shardwise.checkpointing.pickles.pickle_writing import Call, Global, Instance, Pairs, dumps
from shardwise.checkpointing.sharded.writing import FileRecord, WrittenTensor

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
    layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    memory_format = Call(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    properties = (Global("torch", parts[0].dtype), layout, False, memory_format, False)
    state = {"properties": _instance("TensorProperties", properties), "size": _size(parts[0].shape), "chunks": chunks}
    return _instance("TensorStorageMetadata", state)


def _index(name: str, starts: tuple[int, ...] | None, number: int | None) -> Instance:
    state = {"fqn": name, "index": number, **({} if starts is None else {"offset": _size(starts)})}
    return _instance("MetadataIndex", state)


def _place(file: str, offset: int, length: int) -> Instance:
    kind = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    return Instance(kind, {"relative_path": file, "offset": offset, "length": length})


def _size(sizes: tuple[int, ...]) -> Call:
    return Call(Global("torch", "Size"), (tuple(sizes),))


def _instance(name: str, state: Any) -> Instance:
    return Instance(Global(_METADATA, name), state)
