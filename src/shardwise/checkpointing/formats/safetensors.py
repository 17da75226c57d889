"""Safetensors files: headers checked before anything is read, files written with checksums, models in several files."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from shardwise.checkpointing.contents import ITEM_BYTES, Box, Contents, Piece, StoredTensor, TensorInfo
from shardwise.checkpointing.storage import files
from shardwise.checkpointing.storage.memory import BLOCK_BYTES, BlockHasher, checksum, from_hex, to_hex
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


NAMES = {torch_name: name for name, torch_name in DTYPES.items()}
"""torch's names of dtypes, and the format's."""
_ALIGNMENT = 64


class SafetensorsFile:
    """One file while it is written.

    Args:
        path: Must not be there yet.
        tensors: In the order in which their bytes will come.
        fsync: `finish` returns only when the disk has it.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorInfo], fsync: bool) -> None:
        self._path, self._tensors, self._fsync = path, list(tensors), fsync
        self._checksums: dict[str, tuple[int, ...]] = {tensor.name: () for tensor in tensors}
        self._hasher = BlockHasher()
        self._waiting = [(tensor.name, tensor.num_bytes) for tensor in tensors if tensor.num_bytes]
        self._file = files.create(path)
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
            header[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
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


DEFAULT_SHARD_BYTES = 5 * 10**9
"""What Hugging Face's tools write by default."""
_WEIGHT_SUFFIXES = (".safetensors", INDEX_SUFFIX)


class CommittedWriter:
    """Writes under a partial name; as a context manager it commits, unless the block raises."""

    def commit(self) -> None:
        """Finish what is written and give it its name."""
        raise NotImplementedError

    def abort(self) -> None:
        """Remove what was written."""
        raise NotImplementedError

    def __enter__(self) -> Self:
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


class SafetensorsWriter(CommittedWriter):
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
