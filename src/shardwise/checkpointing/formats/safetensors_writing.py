"""Write safetensors as the tensors come, holding none of them: one file, or shards with an index. No torch.

Where each tensor will lie follows from names, dtypes and shapes alone. Everything goes under a partial name and is
renamed when it is whole and on the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardwise.checkpointing.contents import ITEM_BYTES
from shardwise.checkpointing.formats.safetensors import INDEX_SUFFIX
from shardwise.checkpointing.formats.safetensors_file import NAMES, SafetensorsFile
from shardwise.checkpointing.formats.tensor_info import TensorInfo
from shardwise.checkpointing.storage import files
from shardwise.errors import CheckpointError

DEFAULT_SHARD_BYTES = 5 * 10**9
"""What Hugging Face's tools write by default."""
_WEIGHT_SUFFIXES = (".safetensors", INDEX_SUFFIX)


class SafetensorsWriter:
    """One file, or a folder of shards; use as a context manager, which commits unless the block raises.

    Args:
        path: A file if it ends in `.safetensors`, else a folder that becomes a Hugging Face one.
        tensors: All tensors that will come.
        max_shard_bytes: Of tensors in one file, as far as one tensor allows; None: all in one. Folders only.
        stem: What the files in a folder are called: `<stem>.safetensors`.
        companions: Small files to write beside the weights, such as `config.json`.
        overwrite: Replace weights that are there already.
        fsync: Return only when the disk has it.

    Ranks:
        Local: one rank writes.
    """

    def __init__(
        self,
        path: Path,
        tensors: Sequence[TensorInfo],
        *,
        max_shard_bytes: int | None = DEFAULT_SHARD_BYTES,
        stem: str = "model",
        companions: Mapping[str, bytes] | None = None,
        overwrite: bool = False,
        fsync: bool = True,
    ) -> None:
        self._path, self._fsync = Path(path), fsync
        self._is_file = self._path.name.endswith(".safetensors")
        _check(tensors, self._path)
        _refuse_overwrite(self._path, self._is_file, overwrite)
        self._shards = distribute(tensors, path, max_shard_bytes)
        self._names = _file_names(stem, len(self._shards))
        self._partial = self._path.with_name(f".{self._path.name}.partial")
        self._companions = dict(companions or {})
        self._current: SafetensorsFile | None = None
        self._num_done = 0
        files.remove_tree(self._partial)
        files.make_folder(self._path.parent if self._is_file else self._partial)

    @property
    def order(self) -> list[TensorInfo]:
        """The tensors in the order in which `write` wants them."""
        return [tensor for shard in self._shards for tensor in shard]

    def write(self, name: str, data: memoryview) -> None:
        """Append bytes of a tensor, row-major; as many calls as it takes, one tensor after the other in `order`."""
        if self._current is None:
            self._current = self._open_next()
        self._current.write(name, data)
        if self._current.is_complete:
            self._close_current()

    def commit(self) -> None:
        """Finish the files and give them their names.

        Raises:
            CheckpointError: A tensor was not written, or the disk failed. Nothing is left behind.
        """
        while self._num_done < len(self._shards):  # what is left must be without bytes
            if self._current is None:
                self._current = self._open_next()
            self._close_current()
        if self._is_file:
            with files.os_errors("rename the file", self._path):
                os.replace(self._partial, self._path)
            if self._fsync:
                files.sync_folder(self._path.parent)
            return
        for name, data in {**self._companions, **self._index()}.items():
            _write_small(self._partial / name, data, self._fsync)
        _publish_folder(self._partial, self._path, {*self._names, *self._companions, *self._index()}, self._fsync)

    def abort(self) -> None:
        """Remove what was written."""
        with contextlib.suppress(CheckpointError):
            if self._current is not None:
                self._current.close()
        with contextlib.suppress(CheckpointError):
            files.remove_tree(self._partial)

    def __enter__(self) -> SafetensorsWriter:
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

    def _open_next(self) -> SafetensorsFile:
        path = self._partial if self._is_file else self._partial / self._names[self._num_done]
        return SafetensorsFile(path, self._shards[self._num_done], self._fsync)

    def _close_current(self) -> None:
        assert self._current is not None
        self._current.finish()
        self._current = None
        self._num_done += 1

    def _index(self) -> dict[str, bytes]:
        if len(self._shards) == 1:
            return {}
        pairs = zip(self._names, self._shards, strict=True)
        weight_map = {tensor.name: file for file, shard in pairs for tensor in shard}
        total = sum(tensor.num_bytes for shard in self._shards for tensor in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        stem = self._names[0].rpartition("-00001-of-")[0]
        return {stem + INDEX_SUFFIX: json.dumps(index, indent=2).encode() + b"\n"}


def _check(tensors: Sequence[TensorInfo], path: Path) -> None:
    strange = [f"{tensor.name}: {tensor.dtype}" for tensor in tensors if tensor.dtype not in NAMES]
    if strange:
        raise CheckpointError(
            f"{len(strange)} tensors have a dtype that safetensors does not have",
            where="\n".join(strange[:20]),
            why=f"it has {', '.join(NAMES)}",
            fix="pass dtype=, or write another format",
        )
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names) or "__metadata__" in names:
        raise CheckpointError(
            "two tensors have the same name, or one is called __metadata__", where=str(path), fix="rename one"
        )


def distribute(
    tensors: Sequence[TensorInfo], path: Path, max_shard_bytes: int | None = DEFAULT_SHARD_BYTES
) -> list[list[TensorInfo]]:
    """The tensors of each file, in the order in which they are written.

    In the order given; within a file the widest dtypes come first, so that every tensor is aligned.

    Ranks:
        Local. Ranks that gather for the one that writes follow the same order.
    """
    max_bytes = None if Path(path).name.endswith(".safetensors") else max_shard_bytes
    shards: list[list[TensorInfo]] = [[]]
    size = 0
    for tensor in tensors:
        if max_bytes is not None and shards[-1] and size + tensor.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return [sorted(shard, key=lambda tensor: -ITEM_BYTES[tensor.dtype]) for shard in shards]


def _file_names(stem: str, count: int) -> list[str]:
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]


def _refuse_overwrite(path: Path, is_file: bool, overwrite: bool) -> None:
    there = [path.name] if is_file and path.exists() else []
    if not is_file and path.exists() and not path.is_dir():
        raise CheckpointError(
            "this is a file, not a folder", where=str(path), fix="name a folder, or end the name in .safetensors"
        )
    if not is_file:
        there = [name for name in files.names_in(path) if name.endswith(_WEIGHT_SUFFIXES)]
    if there and not overwrite:
        raise CheckpointError(
            f"there are weights already: {there[0]}",
            where=str(path),
            why="they would be lost",
            fix="choose another name, or pass overwrite=True",
        )


def _write_small(path: Path, data: bytes, fsync: bool) -> None:
    with contextlib.closing(files.create(path)) as file:
        file.append([data])
        if fsync:
            file.sync()


def _publish_folder(partial: Path, target: Path, written: set[str], fsync: bool) -> None:
    """Let the partial folder take the place of `target`, keeping what else is in there (a tokenizer, say)."""
    retired = partial.with_name(partial.name + ".old")
    with files.os_errors("rename the folder", target):
        if target.exists():
            for item in target.iterdir():
                if item.name not in written and not item.name.endswith(_WEIGHT_SUFFIXES):
                    _carry_over(item, partial / item.name, fsync)
        if fsync:
            files.sync_folder(partial)
        if target.exists():
            os.rename(target, retired)
        os.rename(partial, target)
    if fsync:
        files.sync_folder(target.parent)
    files.remove_tree(retired)


def _carry_over(source: Path, target: Path, fsync: bool) -> None:
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)
    for item in (target, *target.rglob("*")) if fsync else ():
        if not item.is_symlink():
            files.sync_folder(item)  # or file: whatever has the name
