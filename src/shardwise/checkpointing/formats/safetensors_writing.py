"""Write safetensors as the tensors come, holding none of them: one file, or shards with an index. No torch.

Where each tensor will lie follows from names, dtypes and shapes alone. Checksums are known last, so the header is
written with blanks of their length and filled in at the end. Everything goes under a partial name and is renamed
when it is whole and on the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardwise.checkpointing import files
from shardwise.checkpointing.block_hashing import BlockHasher
from shardwise.checkpointing.checksums import BLOCK_BYTES, checksum, to_hex
from shardwise.checkpointing.contents import ITEM_BYTES
from shardwise.checkpointing.formats.safetensors import (
    DTYPES,
    HEADER_CHECKSUM_KEY,
    INDEX_SUFFIX,
    MAX_HEADER_BYTES,
    METADATA_KEY,
)
from shardwise.checkpointing.tensor_info import TensorInfo
from shardwise.errors import CheckpointError

DEFAULT_SHARD_BYTES = 5 * 10**9
"""What Hugging Face's tools write by default."""
LARGE_BYTES = 64 << 20
"""From here on a file that is synced anyhow is written past the page cache."""
_NAMES = {torch_name: name for name, torch_name in DTYPES.items()}
_BLANK = "0" * 16
_ALIGNMENT = 64
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
        self._current: _ShardFile | None = None
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

    def _open_next(self) -> _ShardFile:
        path = self._partial if self._is_file else self._partial / self._names[self._num_done]
        return _ShardFile(path, self._shards[self._num_done], self._fsync)

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


class _ShardFile:
    """One file while it is written."""

    def __init__(self, path: Path, tensors: Sequence[TensorInfo], fsync: bool) -> None:
        self._path, self._tensors, self._fsync = path, list(tensors), fsync
        self._checksums: dict[str, tuple[int, ...]] = {tensor.name: () for tensor in tensors}
        self._hasher = BlockHasher()
        self._waiting = [(tensor.name, tensor.num_bytes) for tensor in tensors if tensor.num_bytes]
        is_large = fsync and sum(tensor.num_bytes for tensor in tensors) >= LARGE_BYTES
        self._file = files.create(path, large=is_large)
        self._is_open = True
        self._file.append([self._header(is_final=False)])

    @property
    def is_complete(self) -> bool:
        """Whether all bytes have come."""
        return not self._waiting

    def write(self, name: str, data: memoryview) -> None:
        """The next bytes of tensor `name`."""
        if not len(data):
            return
        expected, left = self._waiting[0] if self._waiting else ("nothing", 0)
        if name != expected or len(data) > left:
            raise AssertionError(f"{len(data)} bytes of {name} came where {left} of {expected} were due")
        self._file.append([data])
        self._hasher.update(data)
        self._waiting[0] = (name, left - len(data))
        if left == len(data):
            self._checksums[name] = self._hasher.finish()
            self._waiting.pop(0)

    def finish(self) -> None:
        """Close, and fill the checksums in."""
        if self._waiting:
            name, left = self._waiting[0]
            raise AssertionError(f"{left:,} bytes of {name} did not come")
        if self._fsync:
            self._file.sync()
        self.close()
        with files.os_errors("write the file", self._path), open(self._path, "r+b") as file:
            file.write(self._header(is_final=True))
            file.flush()
            if self._fsync:
                os.fsync(file.fileno())

    def close(self) -> None:
        """Give the file back."""
        if self._is_open:
            self._is_open = False
            self._file.close()

    def _header(self, *, is_final: bool) -> bytes:
        """Of the same length whether the checksums are known or not."""
        blocks = {tensor.name: -(-tensor.num_bytes // BLOCK_BYTES) for tensor in self._tensors}
        digests = {name: to_hex(self._checksums[name]) if is_final else _BLANK * blocks[name] for name in blocks}
        ours = json.dumps({"block_bytes": BLOCK_BYTES, "xxh3": digests}, separators=(",", ":"))
        header: dict[str, object] = {"__metadata__": {"format": "pt", HEADER_CHECKSUM_KEY: _BLANK, METADATA_KEY: ours}}
        end = 0
        for tensor in self._tensors:
            offsets = [end, end + tensor.num_bytes]
            end = offsets[1]
            header[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
        data = json.dumps(header, separators=(",", ":")).encode()
        data += b" " * (-(8 + len(data)) % _ALIGNMENT)
        if len(data) > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"the header would have {len(data):,} bytes",
                where=str(self._path),
                why=f"safetensors allows {MAX_HEADER_BYTES:,}",
                fix="pass a smaller max_shard_bytes",
            )
        if is_final:
            data = data.replace(f'"{_BLANK}"'.encode(), f'"{checksum(data):016x}"'.encode(), 1)
        return len(data).to_bytes(8, "little") + data


def _check(tensors: Sequence[TensorInfo], path: Path) -> None:
    strange = [f"{tensor.name}: {tensor.dtype}" for tensor in tensors if tensor.dtype not in _NAMES]
    if strange:
        raise CheckpointError(
            f"{len(strange)} tensors have a dtype that safetensors does not have",
            where="\n".join(strange[:20]),
            why=f"it has {', '.join(_NAMES)}",
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
                    _carry_over(item, partial / item.name)
        if fsync:
            files.sync_folder(partial)
        if target.exists():
            os.rename(target, retired)
        os.rename(partial, target)
    if fsync:
        files.sync_folder(target.parent)
    files.remove_tree(retired)


def _carry_over(source: Path, target: Path) -> None:
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target, follow_symlinks=False)
