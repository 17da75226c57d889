"""Write a `torch.save` file as the tensors come, holding none of them. No torch.

What the file says about its tensors (dtypes, shapes, nesting) is known before the first of them is written, so the
pickle goes first and each tensor's bytes follow as a record of the zip. The file stands under a partial name until it
is whole and on the disk.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.checkpointing.formats.safetensors_file import LARGE_BYTES
from shardwise.checkpointing.formats.tensor_info import TensorInfo
from shardwise.checkpointing.pickles.pickle_writing import dumps
from shardwise.checkpointing.pickles.torch_file_checksums import RECORD, checksum_record
from shardwise.checkpointing.pickles.torch_zip import ZipStream, tensor_call
from shardwise.checkpointing.storage import files
from shardwise.checkpointing.storage.block_hashing import BlockHasher
from shardwise.errors import CheckpointError


class FullWriter:
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
        is_large = fsync and sum(tensor.num_bytes for tensor in self.order) >= LARGE_BYTES
        self._file = files.create(self._partial, large=is_large)
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

    def __enter__(self) -> FullWriter:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.commit()
        except BaseException:
            self.abort()
            raise

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
