"""Files on local disks; `remote_files` serves object stores through the same functions."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from shardwise.checkpointing.storage import remote_files
from shardwise.errors import CheckpointError

_MAX_VECTORS = 1024  # IOV_MAX of Linux and macOS


class LocalReader:
    """A file open for reading; threads may share it."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers from `offset` on; fewer bytes come back than they hold only where the file ends."""
        total, waiting = 0, [buffer for buffer in buffers if len(buffer)]
        while waiting:
            count = os.preadv(self._descriptor, waiting[:_MAX_VECTORS], offset + total)
            if count == 0:
                break
            total += count
            waiting = _drop(waiting, count)
        return total

    def close(self) -> None:
        """Give the file back."""
        os.close(self._descriptor)


class LocalWriter:
    """A new file, written through the page cache."""

    def __init__(self, path: Path) -> None:
        # O_EXCL: never through a link that somebody laid, never over a file that is there.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def append(self, buffers: Sequence[memoryview | bytes]) -> None:
        """Write the buffers after what is there."""
        waiting = [memoryview(buffer) for buffer in buffers if len(buffer)]
        while waiting:
            waiting = _drop(waiting, os.writev(self._descriptor, waiting[:_MAX_VECTORS]))

    def sync(self) -> None:
        """Return once the disk has it all."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Give the file back."""
        os.close(self._descriptor)


def _drop(buffers: list[memoryview], count: int) -> list[memoryview]:
    """The buffers without their first `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


Place: TypeAlias = Path | str
_FIXES = {
    errno.ENOSPC: "free space on the disk, or keep fewer checkpoints",
    errno.EDQUOT: "free space in your quota, or keep fewer checkpoints",
    errno.EFBIG: "raise the limit on the size of a file (`ulimit -f`)",
    errno.EACCES: "make the folder readable and writable for this user",
    errno.EPERM: "make the folder readable and writable for this user",
    errno.EROFS: "choose a folder on a writable disk",
    errno.ENOENT: "check the path",
}


def place(path: str | Path) -> Place:
    """A `Path`, unless it is a URL of something other than the local disk."""
    text = str(path)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    return text.rstrip("/") if is_remote(path) else Path(path)


def is_remote(path: str | Path) -> bool:
    """Whether fsspec must serve it."""
    return isinstance(path, str) and "://" in path and not path.startswith("file://")


def join(folder: Place, name: str) -> Place:
    """The place of `name` in `folder`."""
    return f"{folder}/{name}" if isinstance(folder, str) else folder / name


def split(path: Place) -> tuple[Place, str]:
    """The folder of a place and its name in it."""
    if isinstance(path, Path):
        return path.parent, path.name
    folder, _, name = path.rpartition("/")
    return folder, name


def check_name(name: str, *, where: str) -> str:
    """`name`, if it stays inside the folder it is relative to.

    Args:
        name: As an index, metadata or manifest gives it.
        where: The file that gives it.

    Raises:
        CheckpointError: It is absolute, climbs with `..`, or is no plain file name.
    """
    pure = PurePosixPath(name)
    strange = not pure.parts or "\\" in name or "\0" in name or ":" in name or str(pure) != name
    if strange or pure.is_absolute() or ".." in pure.parts or pure.parts[0].startswith("~"):
        raise CheckpointError(
            f"the checkpoint names a file outside its folder: {name[:200]!r}",
            where=where,
            why="files of a checkpoint lie in its own folder; anything else may be an attack",
            fix="get the checkpoint again from a source you trust",
        )
    return name


@contextlib.contextmanager
def os_errors(doing: str, path: Place) -> Iterator[None]:
    """Turn OS errors into a `CheckpointError`.

    Args:
        doing: As in "write the file".
        path: What it is about.
    """
    try:
        yield
    except OSError as error:
        fix = _FIXES.get(error.errno or 0, "see the system's message; then try again")
        raise CheckpointError(f"cannot {doing}", where=str(path), why=str(error.strerror or error), fix=fix) from error


class Reader:
    """A file open for reading; threads may share it."""

    def __init__(self, path: Place) -> None:
        self._path = path
        with os_errors("open the file", path):
            self._file = remote_files.RemoteReader(path) if isinstance(path, str) else LocalReader(path)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, one after another, with the bytes from `offset` on.

        Raises:
            CheckpointError: The file ends before they are full.
        """
        with os_errors("read the file", self._path):
            count = self._file.read_into(offset, buffers)
        if count != (wanted := sum(map(len, buffers))):
            raise CheckpointError(
                f"the file ends before byte {offset + wanted:,}",
                where=str(self._path),
                why="it was cut short: by a full disk, an interrupted copy or a crash",
                fix="load an older checkpoint, or copy this one again",
            )

    def close(self) -> None:
        """Give the file back."""
        self._file.close()


class Writer:
    """A new file, written from front to back.

    Args:
        path: Must not be there yet.
    """

    def __init__(self, path: Place) -> None:
        self._path = path
        with os_errors("create the file", path):
            self._file = remote_files.RemoteWriter(path) if isinstance(path, str) else LocalWriter(path)

    def append(self, buffers: Sequence[memoryview | bytes]) -> None:
        """Write the buffers after what is there."""
        with os_errors("write the file", self._path):
            self._file.append(buffers)

    def sync(self) -> None:
        """Return once the disk has it all."""
        with os_errors("sync the file", self._path):
            self._file.sync()

    def close(self) -> None:
        """Give the file back."""
        with os_errors("close the file", self._path):
            self._file.close()


def open_reader(path: Place) -> Reader:
    """Open a file for reading."""
    return Reader(path)


def create(path: Place) -> Writer:
    """Create a file that must not be there yet; see `Writer`."""
    return Writer(path)


def size_of(path: Place) -> int | None:
    """Bytes of a file; None when there is no such file."""
    with os_errors("look at the file", path):
        try:
            if isinstance(path, str):
                return remote_files.size_of(path)
            return path.stat().st_size if path.is_file() else None
        except (FileNotFoundError, NotADirectoryError):
            return None


def exists(path: Place) -> bool:
    """Whether there is a file or folder, or a link of that name."""
    with os_errors("look at the folder", path):
        return remote_files.exists(path) if isinstance(path, str) else os.path.lexists(path)


def read_small(path: Place, limit: int) -> bytes:
    """All bytes of a file that has no reason to be large, such as an index.

    Raises:
        CheckpointError: It is missing, or larger than `limit`.
    """
    size = size_of(path)
    if size is None:
        raise CheckpointError("a file of the checkpoint is missing", where=str(path), fix="check the path")
    if size > limit:
        raise CheckpointError(
            f"the file has {size:,} bytes, more than the {limit:,} that it may have",
            where=str(path),
            why="it is read as a whole, and a damaged or hostile one could fill the memory",
            fix="get the checkpoint again from a source you trust",
        )
    data = bytearray(size)
    with contextlib.closing(open_reader(path)) as reader:
        reader.read_into(0, [memoryview(data)])
    return bytes(data)


def names_in(folder: Place) -> list[str]:
    """Names of the files and folders directly in `folder`, sorted; none when it is not there."""
    with os_errors("list the folder", folder):
        try:
            return sorted(remote_files.names_in(folder) if isinstance(folder, str) else os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []


def make_folder(folder: Place) -> None:
    """Make the folder and those above it; fine if it is there."""
    with os_errors("make the folder", folder):
        if isinstance(folder, str):
            remote_files.make_folder(folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)


def sync_folder(folder: Place) -> None:
    """Return once the disk knows which names are in the folder; object stores always do."""
    if isinstance(folder, str):
        return
    with os_errors("sync the folder", folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that cannot sync folders
                raise
        finally:
            os.close(descriptor)


def remove_tree(path: Place) -> None:
    """Remove a folder with all in it, or a file; fine if it is not there."""
    with os_errors("remove the folder", path), contextlib.suppress(FileNotFoundError):
        if isinstance(path, str):
            remote_files.remove_tree(path)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
