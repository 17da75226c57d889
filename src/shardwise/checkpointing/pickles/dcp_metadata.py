"""Read the `.metadata` of a Distributed Checkpoint folder without unpickling it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpointing.contents import Box
from shardwise.checkpointing.pickles.machine import Record, load_pickle
from shardwise.checkpointing.pickles.torch_objects import DCP_METADATA, dtype_name
from shardwise.checkpointing.storage import files
from shardwise.errors import CheckpointError

MAX_METADATA_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class DcpItem:
    """Where one tensor chunk, or one pickled value, lies: a `torch.save` stream of its own."""

    file: str
    """Relative to the folder, as the file says it: check that it stays inside before opening it."""
    offset: int
    length: int
    transforms: tuple[str, ...] = ()
    """Compression and the like that DCP applied; empty for plain bytes."""


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """One tensor and its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[Box, DcpItem | None], ...]
    """None where the metadata does not say where a chunk lies."""


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """All that a `.metadata` says, as plain values."""

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, DcpItem | None]
    """Everything that is no tensor: a pickle for each."""
    structure: Mapping[str, tuple[str | int, ...]]
    """Flat name to its path in the nested state dict."""
    version: str | None


def read_dcp_metadata(folder: files.Place) -> DcpMetadata:
    """Read the `.metadata` of a folder.

    Raises:
        CheckpointError: It is missing, damaged, or names something no checkpoint needs.

    Ranks:
        Local.
    """
    place = files.join(folder, ".metadata")
    data = files.read_small(place, MAX_METADATA_BYTES)
    made = load_pickle(data, allowed=DCP_METADATA, where=str(place), max_bytes=MAX_METADATA_BYTES)
    path = Path(str(place))
    if not isinstance(made, Record) or not made.name.endswith(".Metadata"):
        raise _unusable(path, "it is a pickle of something else")
    fields = made.fields
    try:
        items = _items(fields.get("storage_data") or {})
        tensors: dict[str, DcpTensor] = {}
        values: dict[str, DcpItem | None] = {}
        for name, entry in fields["state_dict_metadata"].items():
            if not isinstance(name, str):
                raise ValueError(f"{name!r} is no name")
            if entry.name.endswith("BytesStorageMetadata"):
                values[name] = items.get((name, None))
            else:
                tensors[name] = _tensor(name, entry.fields, items)
        structure = _structure(fields.get("planner_data"))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise _unusable(path, f"a field is missing or not what it should be: {error}") from None
    version = fields.get("version")
    return DcpMetadata(tensors, values, structure, version if isinstance(version, str) else None)


def _tensor(name: str, entry: dict[str, Any], items: dict[tuple[str, Any], DcpItem]) -> DcpTensor:
    properties = entry["properties"]
    dtype = dtype_name(properties.state[0] if isinstance(properties.state, tuple) else properties.fields["dtype"])
    shape = entry["size"]
    if not isinstance(shape, tuple):
        raise ValueError(f"{name}: no shape")
    chunks = []
    for chunk in entry["chunks"]:
        box = Box(chunk.fields["offsets"], chunk.fields["sizes"])
        if not isinstance(box.starts, tuple) or not isinstance(box.sizes, tuple) or not box.lies_in(shape):
            raise ValueError(f"{name}: a chunk that lies outside the tensor")
        chunks.append((box, items.get((name, box.starts))))
    return DcpTensor(dtype, shape, tuple(chunks))


def _items(stored: dict[Any, Any]) -> dict[tuple[str, Any], DcpItem]:
    items: dict[tuple[str, Any], DcpItem] = {}
    for index, info in stored.items():
        key, place = index.fields, info.fields
        file, offset, length = place["relative_path"], place["offset"], place["length"]
        if not (isinstance(file, str) and _is_size(offset) and _is_size(length) and isinstance(key["fqn"], str)):
            raise ValueError(f"{key.get('fqn')!r}: no place in a file")
        start = key.get("offset")
        if start is not None and not (isinstance(start, tuple) and all(map(_is_size, start))):
            raise ValueError(f"{key['fqn']}: an offset that is no shape")
        transforms = tuple(str(transform) for transform in place.get("transform_descriptors") or ())
        items[key["fqn"], start] = DcpItem(file, offset, length, transforms)
    return items


def _structure(planner_data: Any) -> dict[str, tuple[str | int, ...]]:
    """DCP's mapping of flat names to paths; absent in folders written without flattening."""
    if not isinstance(planner_data, dict):
        return {}
    return {
        name: path
        for name, path in planner_data.items()
        if isinstance(name, str) and isinstance(path, tuple) and all(isinstance(part, (str, int)) for part in path)
    }


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _unusable(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name} cannot be read",
        where=str(path),
        why=why,
        fix="restore the file from a copy, or use another checkpoint",
    )
