"""Single `torch.save` files of a whole run, and Hugging Face's `.bin` shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.checkpointing import storage
from shardwise.checkpointing.contents import ChunkSpec, Contents, KeyPath, StoredTensor, TorchStream
from shardwise.checkpointing.formats.safetensors import Chunks, append_tensor, join_files, read_index, refuse_overwrite
from shardwise.checkpointing.formats.values import decode_value, nest
from shardwise.checkpointing.pickles import torch_files
from shardwise.checkpointing.pickles.machine import TensorRef
from shardwise.errors import CheckpointError

NOTES = "__shardwise__"
"""Key of the notes, a JSON text with the values that are not plain, the step and the world size."""
_HIDDEN = ("__layout__", "__kinds__")


def full_tree(
    tensors: Mapping[str, StoredTensor],
    encoded: Mapping[str, Any],
    structure: Mapping[str, KeyPath],
    *,
    step: int | None = None,
    world_size: int | None = None,
) -> dict[str, Any]:
    """Build the dictionary that `FullWriter` writes, from tensors and encoded values (`encode_value`) by flat name.

    It has the plain values for readers that use `torch.load`, and the notes (JSON text) with all others.
    """
    decoded = {name: decode_value(value) for name, value in encoded.items() if not _is_hidden(name)}
    leaves = {**tensors, **{name: value for name, value in decoded.items() if _is_plain(value)}}
    values = {name: value for name, value in encoded.items() if _is_structured(value) or _is_hidden(name)}
    paths = {name: structure[name] for name in values if name in structure}
    notes = json.dumps({"values": values, "structure": paths, "step": step, "world_size": world_size})
    return {**nest({structure.get(name, (name,)): leaf for name, leaf in leaves.items()}), NOTES: notes}


def with_notes(contents: Contents) -> Contents:
    """Add the values in the notes to the contents; files of other programs, without notes, are unchanged."""
    if NOTES not in contents.values:
        return contents
    with storage.parsing("the notes of the file cannot be read", f"{contents.path}: {NOTES}"):
        notes = json.loads(contents.values[NOTES])
        values = {str(name): decode_value(note) for name, note in notes["values"].items()}
        structure = {str(name): tuple(path) for name, path in notes["structure"].items()}
        step, world_size = notes["step"], notes["world_size"]
        if not all(number is None or type(number) is int for number in (step, world_size)):
            raise TypeError("step and world_size must be integers or null")
    inside = tuple(f"{name}." for name in values)
    kept = {name: value for name, value in contents.values.items() if name != NOTES and not name.startswith(inside)}
    paths = {name: path for name, path in contents.structure.items() if name in kept or name in contents.tensors}
    return replace(
        contents,
        values={**kept, **values},
        structure={**paths, **structure},
        step=step,
        world_size=world_size,
        details={**contents.details, "has_our_names": True},
    )


def _is_hidden(name: str) -> bool:
    return name.rpartition(".")[2] in _HIDDEN


def _is_structured(encoded: Any) -> bool:
    return isinstance(encoded, dict) or (isinstance(encoded, list) and any(map(_is_structured, encoded)))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    if type(value) in (list, tuple, set):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, bytes)


def read_full(path: str | storage.Place) -> Contents:
    """Read a `torch.save` file of a state dict, or of nested dictionaries, whose keys are joined by dots."""
    file = torch_files.read_torch_file(path)
    tensors = {}
    for name, reference in file.state.tensors.items():
        if not isinstance(reference, TensorRef):
            raise CheckpointError(
                f"{name!r} is one rank's part of a larger tensor",
                where=str(file.place),
                why="the file was written by one rank of a sharded run (ShardedTensor or DTensor), not gathered",
                fix="name the folder that holds the files of all ranks",
            )
        chunk = file.chunk(reference, ChunkSpec.whole(reference.shape))
        tensors[name] = StoredTensor(name, reference.dtype, reference.shape, (chunk,))
    contents = Contents(
        path=storage.split(file.place)[0] if isinstance(file.place, str) else file.place,  # URL: the folder
        format="full",
        tensors=tensors,
        values=file.state.values,
        file_bytes={file.name: file.num_bytes},
        block_bytes=file.block_bytes,
        structure=file.state.structure,
        streams=(TorchStream(file.name, 0, file.num_bytes),),
        details={"left_out": file.state.left_out} if file.state.left_out else {},
    )
    return with_notes(contents)


class FullWriter:
    """Writes a `torch.save` file, which appears only when it is complete and synced.

    `tree` is the value that `torch.load` will return, with a `StoredTensor` in place of each tensor; an object that
    occurs twice is stored as one tensor with two names.
    """

    def __init__(self, path: Path, tree: Mapping[str, Any], *, overwrite: bool = False) -> None:
        self._path, self._tree, self._overwrite = path, tree, overwrite
        self.order = tensors_in(tree)
        """Tensors in the order of writing; ranks that gather for the writing rank use the same order."""

    def check(self) -> None:
        """Raise if the path cannot be written."""
        refuse_overwrite(self._path, self._overwrite, is_file=True)

    def write(self, chunks: Chunks) -> None:
        """Write the tensors' bytes, given in the order of `order`; call it on one rank."""
        self.check()
        keys = {id(tensor): str(index) for index, tensor in enumerate(self.order)}
        pickled = torch_files.dumps(_as_calls(self._tree, keys))
        stream, checksums = torch_files.ZipStream(), {}
        with storage.replace_file(self._path) as file:
            file.append(stream.opening(pickled))
            for tensor in self.order:
                key = keys[id(tensor)]
                file.append(stream.record(f"data/{key}", tensor.num_bytes))
                checksums[key] = append_tensor(file, tensor, chunks)
            file.append(
                stream.whole(torch_files.RECORD, torch_files.checksum_record(pickled, checksums)) + stream.close()
            )


def tensors_in(tree: Any) -> list[StoredTensor]:
    """Return the tensors of a tree, without repetitions, in the order of writing."""
    if isinstance(tree, StoredTensor):
        return [tree]
    below = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple)) else ()
    return list({id(tensor): tensor for value in below for tensor in tensors_in(value)}.values())


def _as_calls(tree: Any, keys: Mapping[int, str]) -> Any:
    """Return the tree with the pickle's call for each tensor in its place."""
    if isinstance(tree, StoredTensor):
        return torch_files.tensor_call(tree.dtype, tree.shape, keys[id(tree)])
    if isinstance(tree, Mapping):
        return {key: _as_calls(value, keys) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_as_calls(value, keys) for value in tree)
    return tree


_INDEX_SUFFIX = ".bin.index.json"


def is_bin_shards(folder: storage.Place) -> bool:
    """Whether a folder has an index of `.bin` files."""
    return any(name.endswith(_INDEX_SUFFIX) for name in storage.names_in(folder))


def read_bin_shards(path: storage.Place) -> Contents:
    """Read the `.bin` shards listed in an index file, or in the index of a folder."""
    folder, name = storage.split(path)
    if not name.endswith(_INDEX_SUFFIX):
        folder, name = path, next(name for name in storage.names_in(path) if name.endswith(_INDEX_SUFFIX))
    weight_map = read_index(storage.join(folder, name))
    read = {file: read_full(storage.join(folder, file)) for file in dict.fromkeys(weight_map.values())}
    return join_files(folder, "full", folder, read, weight_map)
