"""Folders of torch.distributed.checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from shardwise.checkpointing.contents import Box, Contents, Piece, StoredTensor
from shardwise.checkpointing.formats.sharded import MANIFEST_NAME, METADATA_NAME, read_manifest
from shardwise.checkpointing.pickles.dcp_metadata import DcpItem, DcpTensor, read_dcp_metadata
from shardwise.checkpointing.pickles.torch_files import FlatState, TorchFile, plain_value
from shardwise.checkpointing.pickles.torch_objects import TensorRef, read_torch_pickle
from shardwise.checkpointing.pickles.zip_files import ZipIndex
from shardwise.checkpointing.storage.files import (
    Place,
    Reader,
    check_name,
    join,
    open_reader,
    place,
    size_of,
)
from shardwise.errors import CheckpointError

_MAX_PICKLE_BYTES = 64 << 20


def is_dcp(path: str | Path) -> bool:
    """Whether the folder is a Distributed Checkpoint, ours or torch's."""
    folder = place(path)
    return any(size_of(join(folder, name)) is not None for name in (MANIFEST_NAME, METADATA_NAME))


def read_dcp(path: str | Path) -> Contents:
    """Read a Distributed Checkpoint folder as far as its index.

    Values that are no plain data are left out and named in `details["left_out"]` with the reason.

    Raises:
        CheckpointError: A file is missing, damaged, or asks for what no checkpoint needs.

    Ranks:
        Local.
    """
    folder = place(path)
    if size_of(join(folder, MANIFEST_NAME)) is not None:
        return read_manifest(folder)
    metadata = read_dcp_metadata(folder)
    with _Items(folder) as items:
        tensors = {name: items.tensor(name, tensor) for name, tensor in metadata.tensors.items()}
        values, left_out = items.values(metadata.values)
    return Contents(
        path=folder,
        format="dcp",
        tensors=tensors,
        values=values,
        details={"dcp_version": metadata.version, "left_out": left_out},
        structure=metadata.structure,
    )


class _Items(contextlib.ExitStack):
    """The items of a folder; its files stay open between them."""

    def __init__(self, folder: Place) -> None:
        super().__init__()
        self._folder = folder
        self._readers: dict[str, tuple[Reader, int]] = {}
        self._trees: dict[bytes, Any] = {}  # tensors of one shape and dtype have the same pickle

    def tensor(self, name: str, tensor: DcpTensor) -> StoredTensor:
        """Where the chunks of a tensor lie."""
        pieces: dict[Box, Piece] = {}
        for box, item in tensor.chunks:
            if item is None:
                raise self._damaged(METADATA_NAME, f"it does not say where a part of {name} lies")
            if box not in pieces:
                pieces[box] = self._piece(name, tensor.dtype, box, item)
        return StoredTensor(name, tensor.dtype, tensor.shape, tuple(pieces.values()))

    def values(self, stored: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """All plain values by name, and by name why the others are none."""
        values: dict[str, Any] = {}
        left_out: dict[str, str] = {}
        for name, item in stored.items():
            if item is None:
                raise self._damaged(METADATA_NAME, f"it does not say where {name} lies")
            pickled, _ = self._open(name, item)
            try:
                values[name] = plain_value(self._tree(name, item, pickled), where=self._where(item.file))
            except CheckpointError as error:
                left_out[name] = error.what
        return values, left_out

    def _piece(self, name: str, dtype: str, box: Box, item: DcpItem) -> Piece:
        pickled, index = self._open(name, item)
        tree = self._tree(name, item, pickled)
        if not isinstance(tree, TensorRef) or tree.dtype != dtype or tree.shape != box.sizes:
            raise self._damaged(item.file, f"it does not hold the {dtype} of shape {box.sizes} that is {name}")
        offset, num_bytes = index.locate(f"data/{tree.storage.key}")
        storages = {tree.storage.key: (item.offset + offset, num_bytes)}
        file = TorchFile(join(self._folder, item.file), FlatState(), storages, num_bytes)
        piece = file.piece(tree, box)
        return piece if piece.data is not None else dataclasses.replace(piece, file=item.file)

    def _open(self, name: str, item: DcpItem) -> tuple[bytes, ZipIndex]:
        """The item's pickle and its directory."""
        if item.transforms:
            raise self._damaged(item.file, f"{name} was stored through {item.transforms}, which only torch can undo")
        reader, size = self._reader(item.file)
        if item.offset + item.length > size:
            raise self._damaged(item.file, f"it ends at byte {size:,}, but {name} at {item.offset + item.length:,}")

        def read(offset: int, count: int) -> bytes:
            data = bytearray(count)
            reader.read_into(item.offset + offset, [memoryview(data)])
            return bytes(data)

        index = ZipIndex(read, item.length, where=f"{self._where(item.file)}, {name}")
        return index.read_record("data.pkl", _MAX_PICKLE_BYTES), index

    def _tree(self, name: str, item: DcpItem, pickled: bytes) -> Any:
        if pickled not in self._trees:
            self._trees[pickled] = read_torch_pickle(pickled, where=f"{self._where(item.file)}, {name}")
        return self._trees[pickled]

    def _reader(self, file: str) -> tuple[Reader, int]:
        if file not in self._readers:
            where = join(self._folder, check_name(file, where=self._where(METADATA_NAME)))
            if (size := size_of(where)) is None:
                raise CheckpointError(
                    "a file of the checkpoint is missing",
                    where=str(where),
                    why=f"{METADATA_NAME} names it",
                    fix="copy the checkpoint again, with all its files, or load another",
                )
            self._readers[file] = (self.enter_context(contextlib.closing(open_reader(where))), size)
        return self._readers[file]

    def _where(self, file: str) -> str:
        return str(join(self._folder, file))

    def _damaged(self, file: str, why: str) -> CheckpointError:
        return CheckpointError(
            "the checkpoint is damaged",
            where=self._where(file),
            why=why,
            fix="load an older checkpoint, or copy this one again",
        )
