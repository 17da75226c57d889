"""Objects in a store that fsspec serves, by URL; OS errors leave as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from shardwise.errors import CheckpointError


class RemoteReader:
    """An object open for reading."""

    def __init__(self, url: str) -> None:
        self._fs, self._path = file_system(url)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers from `offset` on; fewer bytes come back than they hold only where the object ends."""
        size = sum(map(len, buffers))
        if size == 0:
            return 0
        data = memoryview(self._fs.cat_file(self._path, start=offset, end=offset + size))
        total = len(data)
        for buffer in filter(len, buffers):  # an empty one may be read-only
            buffer[: len(data)] = data[: len(buffer)]
            data = data[len(buffer) :]
        return total

    def close(self) -> None:
        """Nothing is held."""


class RemoteWriter:
    """A new object; it is there when it is closed, or not at all."""

    def __init__(self, url: str) -> None:
        fs, path = file_system(url)
        self._file = fs.open(path, "wb")

    def append(self, buffers: Sequence[memoryview | bytes]) -> None:
        """Write the buffers after what is there."""
        for buffer in buffers:
            self._file.write(buffer)

    def sync(self) -> None:
        """A store has what it has."""

    def close(self) -> None:
        """Make it an object."""
        self._file.close()


def size_of(url: str) -> int | None:
    """Bytes of an object; None when it is a folder."""
    fs, path = file_system(url)
    info = fs.info(path)
    return int(info["size"]) if info["type"] == "file" else None


def exists(url: str) -> bool:
    """Whether there is an object, or any under that prefix."""
    fs, path = file_system(url)
    return bool(fs.exists(path))


def names_in(url: str) -> list[str]:
    """Names directly under the prefix."""
    fs, path = file_system(url)
    fs.invalidate_cache()  # listings are cached, and other ranks write meanwhile
    return [PurePosixPath(each.rstrip("/")).name for each in fs.ls(path, detail=False)]


def make_folder(url: str) -> None:
    """Make the bucket or folder, where the store has such a thing."""
    fs, path = file_system(url)
    fs.makedirs(path, exist_ok=True)


def remove_tree(url: str) -> None:
    """Remove an object, or all under the prefix."""
    fs, path = file_system(url)
    fs.rm(path, recursive=True)


def file_system(url: str) -> tuple[Any, str]:
    """The store of a URL, and what the store calls the place."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # the package of that scheme, or no such scheme
        raise CheckpointError(
            "cannot open the store", where=url, why=str(error), fix="install the fsspec package for this kind of URL"
        ) from error
