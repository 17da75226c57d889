"""Safetensors files: headers checked before anything is read, files written with checksums, models in several files."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.checkpointing import contents, storage
from shardwise.errors import CheckpointError

_DTYPES = {name: dtype for dtype, (_, name, _) in contents.DTYPES.items() if name}
"""The format's names of dtypes, and torch's."""

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_INDEX_BYTES = 100_000_000
INDEX_SUFFIX = ".safetensors.index.json"
_WEIGHT_SUFFIXES = (".safetensors", INDEX_SUFFIX)
_METADATA_KEY, _HEADER_CHECKSUM_KEY = "shardwise", "shardwise.header"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_STEMS = ("model", "diffusion_pytorch_model", "adapter_model")
_WRITTEN = re.compile(rf"({'|'.join(_STEMS)})(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")
_PARTIAL = ".shardwise.partial"
_BLANK = "0" * 16
_GET_AGAIN = "get the file again from where it came from, or write it again"
_MISSING = "a file of the checkpoint is missing"


def is_safetensors(path: str | storage.Place) -> bool:
    """Whether `path` looks like this format: by name only, nothing is opened."""
    place = storage.place(path)
    return any(name.endswith(_WEIGHT_SUFFIXES) for name in (storage.split(place)[1], *storage.names_in(place)))


def read_safetensors(path: str | storage.Place) -> contents.Contents:
    """Read the headers of a file, of an index and its files, or of the weights in a folder."""
    place = storage.place(path)
    folder, name = storage.split(place)
    if not name.endswith(_WEIGHT_SUFFIXES):
        folder = place
        chosen = _choose(folder)
    else:
        chosen = [name]
    index = read_index(storage.join(folder, chosen[0])) if chosen[0].endswith(INDEX_SUFFIX) else None
    read = {file: _read_header(folder, file) for file in (chosen if index is None else dict.fromkeys(index.values()))}
    # Whether a URL is a folder cannot be seen from it.
    return join_files(folder if isinstance(place, str) else place, "safetensors", folder, read, index)


def _choose(folder: storage.Place) -> list[str]:
    """The files of a folder that are its weights, or their index."""
    names = storage.names_in(folder)
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    plain = [name for name in names if name.endswith(".safetensors")]
    for name in (stem + suffix for suffix in _WEIGHT_SUFFIXES for stem in _STEMS[:2]):
        if name in names:
            return [name]
    if len(indexes) == 1:
        return indexes
    if (name := f"{_STEMS[2]}.safetensors") in plain:
        return [name]
    shards = [match for name in plain if (match := _SHARD.fullmatch(name))]
    if len(plain) == 1 and not indexes and not shards:
        return plain
    if shards and len(shards) == len(plain) and len({(m[1], m[3]) for m in shards}) == 1 and not indexes:
        missing = sorted(set(range(1, int(shards[0][3]) + 1)) - {int(match[2]) for match in shards})
        if not missing:
            return plain
        name = f"{shards[0][1]}-{missing[0]:05d}-of-{shards[0][3]}.safetensors"
        raise _broken(storage.join(folder, name), _MISSING, "the others of its set are there")
    raise CheckpointError(
        f"cannot tell which of {len(plain)} safetensors files and {len(indexes)} indexes are the weights",
        where=str(folder),
        why="a folder holds model.safetensors, or shards with one index",
        fix="name the file itself",
    )


def read_index(path: storage.Place) -> dict[str, str]:
    """Tensor name to file name, as an index of Hugging Face gives them."""
    with storage.parsing("the index cannot be read", path, _GET_AGAIN):
        weight_map = json.loads(storage.read_small(path, _MAX_INDEX_BYTES))["weight_map"]
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise TypeError("weight_map is not an object of strings")
    for file in dict.fromkeys(weight_map.values()):
        storage.check_name(file, where=str(path))
    return weight_map


def join_files(
    path: storage.Place,
    format: str,
    folder: storage.Place,
    read: Mapping[str, contents.Contents],
    index: Mapping[str, str] | None,
) -> contents.Contents:
    """The tensors of several files, by name of the file; where there is an index, it says which file counts."""
    tensors: dict[str, contents.StoredTensor] = {}
    for file, part in read.items():
        for name, tensor in part.tensors.items():
            if index is not None and index.get(name, file) != file:
                continue  # a copy
            if name in tensors:
                why = f"{name!r} is also in {tensors[name].chunks[0].file or 'another file'}"
                raise _broken(storage.join(folder, file), "two files hold the same tensor", why)
            tensors[name] = tensor
    for name, file in (index or {}).items():
        if name not in tensors:
            why = f"the index says that it holds {name!r}"
            raise _broken(storage.join(folder, file), "a tensor is not in its file", why)
    block_bytes = {part.block_bytes for part in read.values() if part.block_bytes}
    if len(block_bytes) > 1:
        raise _broken(path, "files with checksums over blocks of different sizes", f"{sorted(block_bytes)} bytes")
    return replace(contents.merge_contents(path, format, read.values()), tensors=tensors)


def _read_header(folder: storage.Place, name: str) -> contents.Contents:
    path = storage.join(folder, name)
    size = storage.size_of(path)
    if size is None:
        raise _broken(path, _MISSING, "the index or the folder's set of files names it")
    with storage.FileReader(path) as reader:
        length = int.from_bytes(reader.read(0, min(8, size)), "little")
        if size < 8 or length > MAX_HEADER_BYTES or 8 + length > size:
            why = f"it has {size:,} bytes and claims a header of {length:,}"
            raise _broken(path, "this is not a safetensors file, or it was cut short", why)
        data = reader.read(8, length)
    with storage.parsing("the header is damaged", path, _GET_AGAIN):
        return _parse(path, data, size)


def _parse(path: storage.Place, data: bytes, size: int) -> contents.Contents:
    header = json.loads(data, object_pairs_hook=_without_duplicates)
    if not isinstance(header, dict):
        raise ValueError("it is not an object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ is not an object of strings")
    block_bytes, checksums = _checksums(data, metadata)
    end, file = 8 + len(data), storage.split(path)[1]
    tensors = {name: _tensor(file, name, entry, end, checksums.get(name, "")) for name, entry in header.items()}
    # The bytes of the tensors are all there is: none missing, none shared, none besides.
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.chunks[0].offset, tensor.num_bytes)):
        chunk = tensor.chunks[0]
        if chunk.offset != end:
            raise ValueError(f"{tensor.name!r} begins at byte {chunk.offset:,}, where {end:,} is expected")
        if block_bytes and len(chunk.checksums) != -(-tensor.num_bytes // block_bytes):
            raise ValueError(f"{tensor.name!r} does not have a checksum for each of its blocks")
        end += tensor.num_bytes
    if end != size:
        raise ValueError(f"the tensors end at byte {end:,}, the file at {size:,}")
    return contents.Contents(path, "safetensors", tensors, file_bytes={file: size}, block_bytes=block_bytes)


def _tensor(file: str, name: str, entry: Any, data_start: int, checksums: str) -> contents.StoredTensor:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"{name!r} has the dtype {entry['dtype']!r}, which torch does not support")
    shape = contents.sizes_of(entry["shape"])
    start, end = contents.sizes_of(entry["data_offsets"])
    if end - start != math.prod(shape) * contents.ITEM_BYTES[dtype]:
        raise ValueError(f"{name!r} of shape {list(shape)} and {dtype} has {end - start:,} bytes")
    chunk = contents.StoredChunk(contents.ChunkSpec.whole(shape), file, data_start + start, storage.from_hex(checksums))
    return contents.StoredTensor(name, dtype, shape, (chunk,))


def _checksums(data: bytes, metadata: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    """Bytes under one checksum, and each tensor's checksums; 0 and none in files that others wrote."""
    stored = metadata.get(_HEADER_CHECKSUM_KEY)
    if (stored is None) != (_METADATA_KEY not in metadata):
        raise ValueError("it has checksums of its tensors or of itself, but not both")
    if stored is None:
        return 0, {}
    blank = data.replace(stored.encode(), _BLANK.encode(), 1)
    if len(stored) != 16 or f"{storage.checksum(blank):016x}" != stored:
        raise ValueError("the checksum of its header does not match")
    ours = json.loads(metadata[_METADATA_KEY])
    block_bytes, checksums = ours["block_bytes"], ours["xxh3"]
    if not isinstance(block_bytes, int) or not 1 << 10 <= block_bytes <= 1 << 30 or not isinstance(checksums, dict):
        raise ValueError("the checksums cannot be read")
    return block_bytes, checksums


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs in it twice")
    return found


def _broken(path: storage.Place, what: str, why: str) -> CheckpointError:
    return storage.damaged(what, path, why, _GET_AGAIN)


DEFAULT_SHARD_BYTES = 5 * 10**9
"""What Hugging Face's tools write by default."""
Chunks = Iterator[tuple[contents.StoredTensor, memoryview]]
"""Bytes to write: a tensor and its next bytes, row-major; as many a tensor as it takes."""
_ALIGNMENT = 64


def append_tensor(file: storage.FileWriter, info: contents.StoredTensor, chunks: Chunks) -> tuple[int, ...]:
    """Write the next tensor of `chunks`, which must be `info`; return the checksums of its blocks."""

    def parts() -> Iterator[memoryview]:
        left = info.num_bytes
        while left:
            source, data = next(chunks, (None, memoryview(b"")))
            if source is None or (len(data) and (source.name != info.name or len(data) > left)):
                came = "nothing" if source is None else f"{len(data)} bytes of {source.name}"
                raise AssertionError(f"{came} came where {left} bytes of {info.name} were due")
            yield data
            left -= len(data)

    return file.append_blocks(parts())


class SafetensorsWriter:
    """Writes a file, or a Hugging Face folder of shards and `sidecars`, which appears when it is whole and synced."""

    def __init__(
        self,
        path: Path,
        tensors: Iterable[contents.StoredTensor],
        *,
        max_shard_bytes: int | None = DEFAULT_SHARD_BYTES,
        stem: str = "model",
        sidecars: Mapping[str, bytes] | None = None,
        overwrite: bool = False,
    ) -> None:
        self._path, self._stem, self._sidecars, self._overwrite = path, stem, dict(sidecars or {}), overwrite
        self._is_file = path.name.endswith(".safetensors")
        shards, size = [[]], 0
        for tensor in tensors:
            if not self._is_file and max_shard_bytes and shards[-1] and size + tensor.num_bytes > max_shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(tensor)
            size += tensor.num_bytes
        # Within a file the widest dtypes come first, so that every tensor is aligned.
        self._shards: list[list[contents.StoredTensor]] = [
            sorted(shard, key=lambda tensor: -contents.ITEM_BYTES[tensor.dtype]) for shard in shards
        ]
        self.order = [tensor for shard in self._shards for tensor in shard]
        """The tensors as they are written; ranks that gather for the one that writes follow it."""

    def check(self) -> None:
        """Refuse what cannot be written.

        Raises:
            CheckpointError: A dtype is not in the format, two tensors have the same name, or weights are there already.
        """
        refuse_overwrite(self._path, self._overwrite, is_file=self._is_file)
        strange = [f"{tensor.name}: {tensor.dtype}" for tensor in self.order if tensor.dtype not in _DTYPES.values()]
        if strange:
            raise CheckpointError(
                f"{len(strange)} tensors have a dtype that safetensors does not have",
                where="\n".join(strange[:20]),
                why=f"it has {', '.join(_DTYPES.values())}",
                fix="pass dtype=, or write another format",
            )
        names = [tensor.name for tensor in self.order]
        if len(set(names)) != len(names) or "__metadata__" in names:
            what = "two tensors have the same name, or one is called __metadata__"
            raise CheckpointError(what, where=str(self._path), fix="rename one")

    def write(self, chunks: Chunks) -> None:
        """Write the tensors' bytes, which come in the order of `order`; call it on one rank."""
        self.check()
        if self._is_file:
            with storage.replace_file(self._path) as file:
                _write_file(file, self._shards[0], chunks)
            return
        count, index = len(self._shards), dict[str, bytes]()
        names = [f"{self._stem}-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]
        if count == 1:
            names = [f"{self._stem}.safetensors"]
        else:
            weight_map = {
                tensor.name: file for file, shard in zip(names, self._shards, strict=True) for tensor in shard
            }
            total = sum(tensor.num_bytes for tensor in self.order)
            described = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            index[self._stem + INDEX_SUFFIX] = json.dumps(described, indent=2).encode() + b"\n"
        is_new = not self._path.exists()
        partial = self._path.with_name(f".{self._path.name}.partial") if is_new else self._path / _PARTIAL
        with storage.removed_on_error(partial):
            storage.make_folder(partial)
            for name, shard in zip(names, self._shards, strict=True):
                with storage.FileWriter(partial / name) as file:
                    _write_file(file, shard, chunks)
                    file.sync()
            for name, data in (self._sidecars | index).items():
                storage.write_small(partial / name, data)
            storage.sync_folder(partial)
            if is_new:
                with storage.os_errors("rename the folder", self._path):
                    os.rename(partial, self._path)
                storage.sync_folder(self._path.parent)
                return
        _replace_weights(partial, self._path, [*self._sidecars, *names, *index])


def _write_file(file: storage.FileWriter, tensors: Sequence[contents.StoredTensor], chunks: Chunks) -> None:
    blanks = {tensor.name: _BLANK * -(-tensor.num_bytes // storage.BLOCK_BYTES) for tensor in tensors}
    file.append(_header(tensors, blanks))
    header = _header(tensors, {tensor.name: storage.to_hex(append_tensor(file, tensor, chunks)) for tensor in tensors})
    header = header.replace(f'"{_BLANK}"'.encode(), f'"{storage.checksum(header[8:]):016x}"'.encode(), 1)
    file.rewrite_start(header)


def _header(tensors: Sequence[contents.StoredTensor], digests: Mapping[str, str]) -> bytes:
    """Of the same length whether the checksums are known or not."""
    ours = json.dumps({"block_bytes": storage.BLOCK_BYTES, "xxh3": digests}, separators=(",", ":"))
    header: dict[str, object] = {"__metadata__": {"format": "pt", _HEADER_CHECKSUM_KEY: _BLANK, _METADATA_KEY: ours}}
    end = 0
    for tensor in tensors:
        offsets = [end, end + tensor.num_bytes]
        end = offsets[1]
        header[tensor.name] = {
            "dtype": contents.DTYPES[tensor.dtype][1],
            "shape": tensor.shape,
            "data_offsets": offsets,
        }
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-(8 + len(data)) % _ALIGNMENT)
    if len(data) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"a header would have {len(data):,} bytes",
            why=f"safetensors allows {MAX_HEADER_BYTES:,}",
            fix="pass a smaller max_shard_bytes",
        )
    return len(data).to_bytes(8, "little") + data


def refuse_overwrite(path: Path, overwrite: bool, *, is_file: bool) -> None:
    """Refuse a path that cannot hold weights, as a file or as a folder, or that has some already."""
    storage.make_folder(path.parent)
    folder = path if path.is_dir() and not is_file else path.parent
    with storage.os_errors("write into the folder", folder):
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if path.exists() and path.is_dir() == is_file:
        what = "this is a folder, not a file" if is_file else "this is a file, not a folder"
        fix = "name a file, as in weights.pt or weights.safetensors" if is_file else "name a folder"
        raise CheckpointError(what, where=str(path), fix=fix)
    there = [path.name] if is_file and path.exists() else []
    there += [name for name in storage.names_in(path) if name.endswith(_WEIGHT_SUFFIXES)]
    if there and not overwrite:
        raise CheckpointError(
            f"{there[0]} is there already",
            where=str(path),
            why="it would be overwritten",
            fix="choose another name, or pass overwrite=True",
        )


def _replace_weights(partial: Path, folder: Path, names: Sequence[str]) -> None:
    """Move the files into the folder, in place of its weights; its other files, open or linked to, are not touched.

    The old weights are removed after the new ones are there, so that a reader, also one after a crash, finds one or the
    other. Only where an old and a new shard have the same name are the old weights removed first: until all files are
    moved a reader then finds an incomplete set, but never a mixture of both.
    """
    old = [name for name in storage.names_in(folder) if _WRITTEN.fullmatch(name)]
    old.sort(key=lambda name: not name.endswith(INDEX_SUFFIX))  # no index without its shards
    before = old if any(_SHARD.fullmatch(name) and name in names for name in old) else []
    after = [name for name in old if name not in names and not before]
    with storage.os_errors("replace the weights", folder):
        _remove(before, folder)
        for name in names:
            os.replace(partial / name, folder / name)
        storage.sync_folder(folder)
        _remove(after, folder)
    storage.remove_tree(partial)


def _remove(names: Sequence[str], folder: Path) -> None:
    for name in names:
        (folder / name).unlink()
    if names:
        storage.sync_folder(folder)
