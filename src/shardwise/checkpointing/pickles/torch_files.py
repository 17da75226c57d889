"""Open a `torch.save` file as data: its state dict, and where each tensor's bytes lie. Nothing in it is run.

torch is imported only to put a tensor in order whose elements do not lie one after another in its file.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.checkpointing.contents import ITEM_BYTES, Box, Piece
from shardwise.checkpointing.pickles.safe_pickle import MAX_PICKLE_BYTES
from shardwise.checkpointing.pickles.state_tree import FlatState, flatten_state
from shardwise.checkpointing.pickles.torch_file_checksums import read_checksums
from shardwise.checkpointing.pickles.torch_objects import read_torch_pickle
from shardwise.checkpointing.pickles.torch_refs import StorageRef, TensorRef
from shardwise.checkpointing.pickles.zip_index import ZipIndex
from shardwise.checkpointing.storage import files
from shardwise.checkpointing.storage.memory import bytes_of
from shardwise.errors import CheckpointError

ZIP_START = b"PK\x03\x04"
_MAX_COPIED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A `torch.save` file, read as far as its pickle."""

    place: files.Place
    state: FlatState
    storages: Mapping[str, tuple[int, int]]
    """Storage key to the byte of the file at which it starts, and its bytes."""
    num_bytes: int
    archive: str = ""
    """What the file was called when it was written, without its ending."""
    block_bytes: int = 0
    """Bytes under one checksum; 0: the file has none."""
    checksums: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of the blocks of each storage, by its key."""

    @property
    def name(self) -> str:
        """In its folder."""
        return files.split(self.place)[1]

    def offset_of(self, storage: StorageRef) -> int:
        """The byte of the file at which a storage starts.

        Raises:
            CheckpointError: The file does not hold it, or not all of it.
        """
        offset, num_bytes = self.storages.get(storage.key, (0, -1))
        if num_bytes < storage.num_bytes:
            raise CheckpointError(
                f"the storage {storage.key[:40]!r} is missing or cut short",
                where=str(self.place),
                why=f"a tensor needs {storage.num_bytes:,} bytes, the file has {max(num_bytes, 0):,}",
                fix="restore the file from a copy, or use another checkpoint",
            )
        return offset

    def piece(self, tensor: TensorRef, box: Box) -> Piece:
        """The tensor's elements as the `box` of a larger tensor."""
        start = self.offset_of(tensor.storage)
        if tensor.is_contiguous:
            offset, num_bytes = tensor.offset * ITEM_BYTES[tensor.dtype], box.numel * ITEM_BYTES[tensor.dtype]
            is_whole = offset == 0 and num_bytes == self.storages[tensor.storage.key][1]
            checksums = self.checksums.get(tensor.storage.key, ()) if is_whole else ()
            return Piece(box, self.name, start + offset, checksums)
        return Piece(box, data=self._in_order(tensor, start))

    def _in_order(self, tensor: TensorRef, start: int) -> memoryview:
        import torch

        num_bytes = math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        if num_bytes > max(tensor.storage.num_bytes, _MAX_COPIED_BYTES):
            raise CheckpointError(
                f"a tensor of {num_bytes:,} bytes is an expanded view of {tensor.storage.num_bytes:,}",
                where=str(self.place),
                why="expanding it could fill the memory",
                fix="save a contiguous copy: tensor.contiguous()",
            )
        data = bytearray(tensor.storage.num_bytes)
        with contextlib.closing(files.open_reader(self.place)) as reader:
            reader.read_into(start, [memoryview(data)])
        flat = torch.frombuffer(data, dtype=getattr(torch, tensor.dtype))
        return bytes_of(flat.as_strided(tensor.shape, tensor.strides, tensor.offset).contiguous())


def is_torch_file(place: files.Place) -> bool:
    """Whether a file begins like one that `torch.save` writes."""
    if (size := files.size_of(place)) is None or size < len(ZIP_START):
        return False
    start = bytearray(len(ZIP_START))
    with contextlib.closing(files.open_reader(place)) as reader:
        reader.read_into(0, [memoryview(start)])
    return bytes(start) == ZIP_START


def read_torch_file(path: str | files.Place) -> TorchFile:
    """Read a `torch.save` file as far as its pickle.

    Args:
        path: The file.

    Raises:
        CheckpointError: It is missing, damaged, of an old kind, or names something no checkpoint needs.

    Ranks:
        Local.
    """
    place = files.place(path) if isinstance(path, str) else path
    where = str(place)
    size = files.size_of(place)
    if size is None:
        raise CheckpointError("there is no such file", where=where, fix="check the path")
    _refuse_other_kinds(place)
    with contextlib.closing(files.open_reader(place)) as reader:

        def read(offset: int, count: int) -> bytes:
            data = bytearray(count)
            reader.read_into(offset, [memoryview(data)])
            return bytes(data)

        index = ZipIndex(read, size, where=where)
        if "byteorder" in index.records and index.read_record("byteorder", 16) != b"little":
            raise CheckpointError(
                "the file was written on a machine with the other byte order",
                where=where,
                why="its numbers would be read backwards",
                fix="load it with torch.load there or here, and save it anew",
            )
        pickled = index.read_record("data.pkl", MAX_PICKLE_BYTES)
        block_bytes, checksums = read_checksums(index, pickled, where)
        tree = read_torch_pickle(pickled, where=where)
        state = flatten_state(tree, where=where)
        storages = {
            name.removeprefix("data/"): index.locate(name) for name in index.records if name.startswith("data/")
        }
    return TorchFile(place, state, storages, size, index.archive, block_bytes, checksums)


def _refuse_other_kinds(place: files.Place) -> None:
    if is_torch_file(place):
        return
    raise CheckpointError(
        "this is not a file that torch.save writes",
        where=str(place),
        why="such a file is a zip archive since torch 1.6; older ones, and plain pickles, are not read",
        fix="load it with the program that wrote it and save it anew with torch.save or safetensors",
    )
