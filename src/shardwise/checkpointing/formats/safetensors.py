"""safetensors: one file, or a Hugging Face folder of shards with an index. Read as far as the headers; no torch.

A file is 8 bytes of header length, a JSON header, and the tensors' bytes one after another without a gap. Files
that we wrote also carry checksums in the header's metadata, under `shardwise` (see `safetensors_writing`).
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.checkpointing.contents import ITEM_BYTES, Box, Contents, Piece, StoredTensor
from shardwise.checkpointing.storage import files
from shardwise.checkpointing.storage.checksums import checksum, from_hex
from shardwise.errors import CheckpointError

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""The format's names of dtypes, and torch's."""

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_INDEX_BYTES = 100_000_000
INDEX_SUFFIX = ".safetensors.index.json"
METADATA_KEY = "shardwise"
HEADER_CHECKSUM_KEY = "shardwise.header"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_BLANK = "0" * 16
_GET_AGAIN = "get the file again from where it came from, or write it anew"


@dataclass(frozen=True, slots=True)
class _File:
    """The header of one file."""

    tensors: dict[str, StoredTensor]
    num_bytes: int
    block_bytes: int
    metadata: Mapping[str, str]


def is_safetensors(path: str | files.Place) -> bool:
    """Whether `path` looks like this format: by name only, nothing is opened."""
    place = files.place(str(path)) if isinstance(path, str) else path
    name = files.split(place)[1]
    if name.endswith((".safetensors", INDEX_SUFFIX)):
        return True
    return any(name.endswith((".safetensors", INDEX_SUFFIX)) for name in files.names_in(place))


def read_safetensors(path: str | files.Place) -> Contents:
    """Read the headers of a file, of an index and its files, or of the weights in a folder.

    Args:
        path: `x.safetensors`, `x.safetensors.index.json`, or a folder with one of the two.

    Returns:
        The contents; names are bare.

    Raises:
        CheckpointError: Naming the file that is missing, damaged, or not what the index says.

    Ranks:
        Local.
    """
    place = files.place(str(path)) if isinstance(path, str) else path
    folder, name = files.split(place)
    if name.endswith(".safetensors"):
        chosen: Iterable[str] = [name]
        index = None
    elif name.endswith(INDEX_SUFFIX):
        index = _read_index(place)
        chosen = dict.fromkeys(index.values())
    else:
        folder = place
        chosen, index = _choose(folder)
    read = {file: _read_file(folder, file) for file in chosen}
    return _joined(place, folder, read, index)


def _choose(folder: files.Place) -> tuple[Iterable[str], dict[str, str] | None]:
    """The files of a folder that are its weights, and what the index says if there is one."""
    names = files.names_in(folder)
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    plain = [name for name in names if name.endswith(".safetensors")]
    for name in ("model.safetensors", "diffusion_pytorch_model.safetensors"):
        if name in plain:
            return [name], None
    if len(indexes) == 1:
        index = _read_index(files.join(folder, indexes[0]))
        return dict.fromkeys(index.values()), index
    if len(plain) == 1 and not indexes and not _SHARD.fullmatch(plain[0]):
        return plain, None
    shards = [match for name in plain if (match := _SHARD.fullmatch(name))]
    if shards and len(shards) == len(plain) and len({(m[1], m[3]) for m in shards}) == 1 and not indexes:
        missing = sorted(set(range(1, int(shards[0][3]) + 1)) - {int(match[2]) for match in shards})
        if not missing:
            return plain, None
        name = f"{shards[0][1]}-{missing[0]:05d}-of-{shards[0][3]}.safetensors"
        raise _broken(
            files.join(folder, name), "a file of the checkpoint is missing", "the others of its set are there"
        )
    raise CheckpointError(
        f"cannot tell which of {len(plain)} safetensors files and {len(indexes)} indexes are the weights",
        where=str(folder),
        why="a folder holds model.safetensors, or shards with one index",
        fix="name the file itself",
    )


def _read_index(path: files.Place) -> dict[str, str]:
    """Tensor name to file name."""
    try:
        index = json.loads(files.read_small(path, MAX_INDEX_BYTES))
        weight_map = index["weight_map"]
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise TypeError("weight_map is no object of strings")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _broken(path, "the index cannot be read", f"{type(error).__name__}: {error}") from None
    for file in dict.fromkeys(weight_map.values()):
        files.check_name(file, where=str(path))
    return weight_map


def _joined(
    place: files.Place, folder: files.Place, read: Mapping[str, _File], index: Mapping[str, str] | None
) -> Contents:
    tensors: dict[str, StoredTensor] = {}
    for file, header in read.items():
        for name, tensor in header.tensors.items():
            if index is not None and index.get(name, file) != file:
                continue  # a copy; the index says which one counts
            if name in tensors:
                why = f"{name!r} is also in {tensors[name].pieces[0].file or 'another file'}"
                raise _broken(files.join(folder, file), "two files hold the same tensor", why)
            tensors[name] = tensor
    for name, file in (index or {}).items():
        if name not in tensors:
            why = f"the index says that it holds {name!r}"
            raise _broken(files.join(folder, file), "a tensor is not in its file", why)
    block_bytes = {header.block_bytes for header in read.values() if header.block_bytes}
    if len(block_bytes) > 1:
        raise _broken(place, "files with checksums over blocks of different sizes", f"{sorted(block_bytes)} bytes")
    return Contents(
        path=folder if isinstance(place, str) else place,  # whether a URL is a folder cannot be seen from it
        format="safetensors",
        tensors=tensors,
        file_bytes={file: header.num_bytes for file, header in read.items()},
        block_bytes=block_bytes.pop() if block_bytes else 0,
        details={"metadata": {file: dict(header.metadata) for file, header in read.items() if header.metadata}},
    )


def _read_file(folder: files.Place, name: str) -> _File:
    path = files.join(folder, name)
    size = files.size_of(path)
    if size is None:
        raise _broken(path, "a file of the checkpoint is missing", "the index or the folder's set of files names it")
    header_bytes, header = _read_header(path, size)
    try:
        return _parse(name, header_bytes, header, size)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        what = error.args[0] if isinstance(error, ValueError) and error.args else f"{type(error).__name__}: {error}"
        raise _broken(path, "the header is damaged", str(what)[:500]) from None


def _read_header(path: files.Place, size: int) -> tuple[int, bytes]:
    """Length of the header and the header."""
    with contextlib.closing(files.open_reader(path)) as reader:
        prefix = bytearray(min(8, size))
        reader.read_into(0, [memoryview(prefix)])
        length = int.from_bytes(prefix, "little")
        if size < 8 or length > MAX_HEADER_BYTES or 8 + length > size:
            why = f"it has {size:,} bytes and claims a header of {length:,}"
            raise _broken(path, "this is no safetensors file, or it was cut short", why)
        header = bytearray(length)
        reader.read_into(8, [memoryview(header)])
    return length, bytes(header)


def _parse(file: str, header_bytes: int, data: bytes, size: int) -> _File:
    header = json.loads(data, object_pairs_hook=_without_duplicates)
    if not isinstance(header, dict):
        raise ValueError("it is no object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ is no object of strings")
    _check_header(data, metadata)
    block_bytes, checksums = _checksums(metadata)
    tensors = {
        name: _tensor(file, name, entry, 8 + header_bytes, from_hex(checksums.get(name, "")))
        for name, entry in header.items()
    }
    _check_no_gaps(tensors, 8 + header_bytes, size)
    if block_bytes:
        _check_counts(tensors, block_bytes)
    return _File(tensors, size, block_bytes, metadata)


def _tensor(file: str, name: str, entry: Any, data_start: int, checksums: tuple[int, ...]) -> StoredTensor:
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"{name!r} has the dtype {entry['dtype']!r}, which torch does not have")
    shape = tuple(entry["shape"])
    start, end = entry["data_offsets"]
    for number in (*shape, start, end):
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << 62:
            raise ValueError(f"{name!r} has the size or offset {number!r}")
    if len(shape) > 64 or end - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"{name!r} of shape {list(shape)} and {dtype} has {end - start:,} bytes")
    piece = Piece(Box.whole(shape), file, data_start + start, checksums)
    return StoredTensor(name, dtype, shape, (piece,))


def _check_no_gaps(tensors: Mapping[str, StoredTensor], data_start: int, size: int) -> None:
    """The bytes of the tensors are all there is: none missing, none shared, none besides."""
    end = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.pieces[0].offset, tensor.num_bytes)):
        if tensor.pieces[0].offset != end:
            raise ValueError(f"{tensor.name!r} begins at byte {tensor.pieces[0].offset:,}, where {end:,} is expected")
        end += tensor.num_bytes
    if end != size:
        raise ValueError(f"the tensors end at byte {end:,}, the file at {size:,}")


def _check_header(data: bytes, metadata: Mapping[str, str]) -> None:
    """Compare the header with its own checksum, where it has one."""
    stored = metadata.get(HEADER_CHECKSUM_KEY)
    if (stored is None) != (METADATA_KEY not in metadata):
        raise ValueError("it has checksums of its tensors or of itself, but not both")
    if stored is None:
        return
    blank = data.replace(stored.encode(), _BLANK.encode(), 1)
    if len(stored) != 16 or f"{checksum(blank):016x}" != stored:
        raise ValueError("it does not have its checksum")


def _checksums(metadata: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    """Bytes under one checksum, and each tensor's checksums; 0 and none in files that others wrote."""
    if METADATA_KEY not in metadata:
        return 0, {}
    ours = json.loads(metadata[METADATA_KEY])
    block_bytes, checksums = ours["block_bytes"], ours["xxh3"]
    if not isinstance(block_bytes, int) or not 1 << 10 <= block_bytes <= 1 << 30 or not isinstance(checksums, dict):
        raise ValueError("the checksums cannot be read")
    return block_bytes, checksums


def _check_counts(tensors: Mapping[str, StoredTensor], block_bytes: int) -> None:
    for tensor in tensors.values():
        if len(tensor.pieces[0].checksums) != -(-tensor.num_bytes // block_bytes):
            raise ValueError(f"{tensor.name!r} does not have a checksum for each of its blocks")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in it twice")
    return found


def _broken(path: files.Place, what: str, why: str) -> CheckpointError:
    return CheckpointError(what, where=str(path), why=why, fix=_GET_AGAIN)
