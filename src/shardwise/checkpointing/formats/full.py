"""Single torch or safetensors files with a whole run, and Hugging Face's `.bin` shards."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.checkpointing.contents import Box, Contents, StoredTensor, TensorInfo
from shardwise.checkpointing.formats.safetensors import CommittedWriter
from shardwise.checkpointing.formats.values import decode_value
from shardwise.checkpointing.pickles.torch_files import RECORD, checksum_record, read_torch_file
from shardwise.checkpointing.pickles.torch_objects import TensorRef
from shardwise.checkpointing.pickles.zip_files import ZipStream, dumps, tensor_call
from shardwise.checkpointing.storage import files
from shardwise.checkpointing.storage.memory import BlockHasher
from shardwise.errors import CheckpointError

NOTES = "__shardwise__"
"""The key of the text (JSON)."""
_HIDDEN = ("__layout__", "__kinds__")


def make_notes(
    encoded: Mapping[str, Any],
    structure: Mapping[str, tuple[str | int, ...]],
    *,
    step: int | None = None,
    world_size: int | None = None,
) -> str:
    """The text, for values as `encode_value` gives them."""
    values = {name: value for name, value in encoded.items() if _is_structured(value) or _is_hidden(name)}
    paths = {name: structure[name] for name in values if name in structure}
    return json.dumps({"values": values, "structure": paths, "step": step, "world_size": world_size})


def plain_values(encoded: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the dictionary itself can hold, for those who read it with `torch.load`."""
    decoded = {name: decode_value(value) for name, value in encoded.items() if not _is_hidden(name)}
    return {name: value for name, value in decoded.items() if _is_plain(value)}


def with_notes(contents: Contents) -> Contents:
    """Put the notes back among the values, where the sharded format has them; files of others are as they are.

    Raises:
        CheckpointError: The notes are damaged.
    """
    if NOTES not in contents.values:
        return contents
    try:
        notes = json.loads(contents.values[NOTES])
        values = {str(name): decode_value(note) for name, note in notes["values"].items()}
        structure = {str(name): tuple(path) for name, path in notes["structure"].items()}
        step, world_size = notes["step"], notes["world_size"]
        if not all(number is None or type(number) is int for number in (step, world_size)):
            raise TypeError("a step or a number of ranks that is none")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            "the notes of the file cannot be read",
            where=f"{contents.path}: {NOTES}",
            why=f"{type(error).__name__}: {error}",
            fix="copy the file again, or load an older one",
        ) from None
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


def read_full(path: str | files.Place) -> Contents:
    """Read a `torch.save` file of nested dictionaries into contents.

    Args:
        path: A state dict, or a dictionary of such (`{"model": ..., "optimizer": ..., "meta": ...}`).

    Returns:
        The contents; nested keys are joined by dots, as Distributed Checkpoint does.

    Raises:
        CheckpointError: The file is damaged, of the format before torch 1.6, would run code, or holds only one
            rank's part.

    Ranks:
        Local.
    """
    file = read_torch_file(path)
    tensors = {}
    for name, reference in file.state.tensors.items():
        if not isinstance(reference, TensorRef):
            raise CheckpointError(
                f"{name!r} is one rank's part of a larger tensor",
                where=str(file.place),
                why="the file was written by one rank of a sharded run (ShardedTensor or DTensor), not gathered",
                fix="name the folder that holds the files of all ranks",
            )
        piece = file.piece(reference, Box.whole(reference.shape))
        tensors[name] = StoredTensor(name, reference.dtype, reference.shape, (piece,))
    contents = Contents(
        path=files.split(file.place)[0] if isinstance(file.place, str) else file.place,  # a URL does not tell
        format="full",
        tensors=tensors,
        values=file.state.values,
        file_bytes={file.name: file.num_bytes},
        block_bytes=file.block_bytes,
        structure=file.state.structure,
        details={"left_out": file.state.left_out} if file.state.left_out else {},
    )
    return with_notes(contents)


class FullWriter(CommittedWriter):
    """A `torch.save` file while it is written; use as a context manager, which commits unless the block raises.

    Args:
        path: The file.
        tree: What `torch.load` will return: nested dictionaries, lists and plain values, with a `TensorInfo` in
            place of each tensor. The same `TensorInfo` object in two places makes two names of one tensor.
        overwrite: Replace a file that is there already.
        fsync: Return only when the disk has it.

    Ranks:
        Local: one rank writes.
    """

    def __init__(self, path: Path, tree: Mapping[str, Any], *, overwrite: bool = False, fsync: bool = True) -> None:
        self._path, self._fsync = Path(path), fsync
        _refuse_overwrite(self._path, overwrite)
        self.order = tensors_in(tree)
        """The tensors in the order in which `write` wants them."""
        self._keys = {id(tensor): str(index) for index, tensor in enumerate(self.order)}
        self._pickled = dumps(_as_calls(tree, self._keys))
        self._partial = self._path.with_name(f".{self._path.name}.partial")
        self._stream, self._hasher = ZipStream(), BlockHasher()
        self._checksums: dict[str, tuple[int, ...]] = {}
        self._next, self._left = 0, 0
        files.make_folder(self._path.parent)
        files.remove_tree(self._partial)
        self._file = files.create(self._partial)
        self._is_open = True
        self._file.append([self._stream.opening(self._pickled)])

    def write(self, tensor: TensorInfo, data: memoryview) -> None:
        """Append bytes of a tensor, row-major; as many calls as it takes, one tensor after the other in `order`."""
        if self._left == 0:
            self._begin(tensor)
        elif tensor is not self.order[self._next - 1]:
            raise AssertionError(f"bytes of {tensor.name} came where {self._left} of another tensor were due")
        if len(data) > self._left:
            raise AssertionError(f"{len(data)} bytes of {tensor.name} came where {self._left} were due")
        self._file.append([data])
        self._hasher.update(data)
        self._left -= len(data)
        if self._left == 0:
            self._checksums[self._keys[id(tensor)]] = self._hasher.finish()

    def commit(self) -> None:
        """Finish the file and give it its name.

        Raises:
            CheckpointError: The disk failed. Nothing is left behind.
        """
        while self._next < len(self.order) and self._left == 0:  # what is left must be without bytes
            self.write(self.order[self._next], memoryview(b""))
        if self._left:
            raise AssertionError(f"{self._left:,} bytes of {self.order[self._next - 1].name} did not come")
        record = checksum_record(self._pickled, self._checksums)
        self._file.append([self._stream.whole(RECORD, record), self._stream.close()])
        if self._fsync:
            self._file.sync()
        self._close()
        with files.os_errors("rename the file", self._path):
            os.replace(self._partial, self._path)
        if self._fsync:
            files.sync_folder(self._path.parent)

    def abort(self) -> None:
        """Remove what was written."""
        with contextlib.suppress(CheckpointError):
            self._close()
        with contextlib.suppress(CheckpointError):
            files.remove_tree(self._partial)

    def _begin(self, tensor: TensorInfo) -> None:
        if self._next >= len(self.order) or tensor is not self.order[self._next]:
            raise AssertionError(f"{tensor.name} came out of turn")
        self._next += 1
        self._left = tensor.num_bytes
        self._file.append([self._stream.record(f"data/{self._keys[id(tensor)]}", tensor.num_bytes)])

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._file.close()


def tensors_in(tree: Any) -> list[TensorInfo]:
    """The tensors of a tree, each once, in the order in which a `FullWriter` writes them.

    Ranks:
        Local. Ranks that gather for the one that writes follow the same order.
    """
    found: dict[int, TensorInfo] = {}
    _collect(tree, found)
    return list(found.values())


def _collect(tree: Any, found: dict[int, TensorInfo]) -> None:
    if isinstance(tree, TensorInfo):
        found.setdefault(id(tree), tree)
    elif isinstance(tree, Mapping):
        for value in tree.values():
            _collect(value, found)
    elif isinstance(tree, Sequence) and not isinstance(tree, (str, bytes)):
        for value in tree:
            _collect(value, found)


def _as_calls(tree: Any, keys: Mapping[int, str]) -> Any:
    """The tree with the pickle's way to say "this tensor" in place of each."""
    if isinstance(tree, TensorInfo):
        return tensor_call(tree.dtype, tree.shape, keys[id(tree)])
    if isinstance(tree, Mapping):
        return {key: _as_calls(value, keys) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_as_calls(value, keys) for value in tree)
    return tree


def _refuse_overwrite(path: Path, overwrite: bool) -> None:
    if path.is_dir():
        raise CheckpointError("this is a folder, not a file", where=str(path), fix="name a file, as in weights.pt")
    if path.exists() and not overwrite:
        raise CheckpointError(
            "there is a file already",
            where=str(path),
            why="it would be lost",
            fix="choose another name, or pass overwrite=True",
        )


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
