"""`manifest.json`: what a sharded checkpoint of ours holds, with a checksum for every byte of it. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shardwise.checkpointing.contents import ITEM_BYTES, Box, Contents, Piece, StoredTensor
from shardwise.checkpointing.sharded.values import decode_value
from shardwise.checkpointing.sharded.writing import FileRecord
from shardwise.checkpointing.storage.checksums import BLOCK_BYTES, checksum, from_hex, to_hex
from shardwise.checkpointing.storage.files import Place, check_name, join, read_small
from shardwise.errors import CheckpointError

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
