"""Hugging Face's older shards: `pytorch_model-00001-of-00002.bin` with an index. Read as data; no torch."""

from __future__ import annotations

import json

from shardwise.checkpointing.contents import Contents, StoredTensor
from shardwise.checkpointing.formats.full import read_full
from shardwise.checkpointing.storage import files
from shardwise.errors import CheckpointError

_INDEX_SUFFIX = ".bin.index.json"
_MAX_INDEX_BYTES = 100_000_000


def is_bin_shards(folder: files.Place) -> bool:
    """Whether a folder has an index of `.bin` files."""
    return any(name.endswith(_INDEX_SUFFIX) for name in files.names_in(folder))


def read_bin_shards(path: files.Place) -> Contents:
    """Read the shards that an index names.

    Args:
        path: The index, or the folder that has it.

    Raises:
        CheckpointError: The index is damaged or points outside its folder, a file is missing or damaged.

    Ranks:
        Local.
    """
    folder, name = files.split(path)
    if not name.endswith(_INDEX_SUFFIX):
        folder, name = path, next(name for name in files.names_in(path) if name.endswith(_INDEX_SUFFIX))
    index = files.join(folder, name)
    weight_map = _read_index(index)
    tensors: dict[str, StoredTensor] = {}
    file_bytes: dict[str, int] = {}
    for file in dict.fromkeys(weight_map.values()):
        contents = read_full(files.join(folder, files.check_name(file, where=str(index))))
        tensors |= {name: tensor for name, tensor in contents.tensors.items() if weight_map.get(name) == file}
        file_bytes |= contents.file_bytes
    if missing := [name for name in weight_map if name not in tensors]:
        raise _damaged(index, f"{missing[0]} is not in {weight_map[missing[0]]}, where the index puts it")
    return Contents(path=folder, format="full", tensors=tensors, file_bytes=file_bytes)


def _read_index(index: files.Place) -> dict[str, str]:
    try:
        weight_map = json.loads(files.read_small(index, _MAX_INDEX_BYTES))["weight_map"]
        if not all(isinstance(file, str) for file in weight_map.values()):
            raise TypeError("weight_map is no object of strings")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(index, f"{type(error).__name__}: {error}") from None
    return weight_map


def _damaged(index: files.Place, why: str) -> CheckpointError:
    return CheckpointError(
        "the index is damaged", where=str(index), why=why, fix="get the files again from where they came from"
    )
