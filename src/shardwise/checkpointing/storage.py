"""Files on local disks and in object stores that fsspec supports; buffers, checksums and progress."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import xxhash

from shardwise.errors import CheckpointError
from shardwise.progress import Progress
from shardwise.units import format_bytes, format_seconds


def bytes_of(memory: Any) -> memoryview:
    """Return a writable view of the bytes of a contiguous CPU tensor, which it keeps alive, or of any other buffer."""
    if not hasattr(memory, "data_ptr"):
        return memoryview(memory).cast("B")
    if memory.device.type != "cpu" or not memory.is_contiguous() or memory.is_conj() or memory.is_neg():
        raise ValueError(f"not a contiguous CPU tensor: {memory.device}, strides {memory.stride()}")
    num_bytes = memory.numel() * memory.element_size()
    if num_bytes == 0:
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * num_bytes).from_address(memory.data_ptr())
    array.keep_alive = memory
    return memoryview(array).cast("B")


def trim_malloc() -> None:
    """Return freed memory to the operating system; for loops that allocate and free large buffers."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only: other allocators do not retain it
    if trim is not None:
        trim(0)


_WRITEBACK_BYTES = 8 << 20
BLOCK_BYTES = 1 << 20
"""Bytes per checksum: few extra bytes are read at the ends of a shard, and the manifest stays short."""


def checksum(data: bytes | bytearray | memoryview) -> int:
    """Return the checksum of contiguous bytes."""
    return xxhash.xxh3_64_intdigest(data)


def checksum_of_parts(parts: Iterable[bytes | bytearray | memoryview]) -> int:
    """Return the checksum of the concatenation of several buffers."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()


def to_hex(checksums: Iterable[int]) -> str:
    """Return the checksums as text, 16 hexadecimal digits each, without separators."""
    return "".join(f"{each:016x}" for each in checksums)


def from_hex(text: str) -> tuple[int, ...]:
    """Parse the output of `to_hex`; raises ValueError for any other text."""
    if len(text) % 16 or not set(text) <= set("0123456789abcdef"):
        raise ValueError("checksums are 16 lower-case hexadecimal digits each")
    return tuple(int(text[start : start + 16], 16) for start in range(0, len(text), 16))


@contextlib.contextmanager
def counting(progress: Progress | None, total: int, label: str) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with each number of bytes done, from one thread at a time; `total` 0: unknown."""
    if progress is None:
        yield lambda num_bytes: None
        return
    start, done = time.monotonic(), 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        rate = done / max(time.monotonic() - start, 1e-9)
        of_total = f" of {format_bytes(total)}" if total else ""
        progress.advance(num_bytes, f"{format_bytes(done)}{of_total}, {format_bytes(rate)}/s")

    progress.start(total, label)
    try:
        yield count
    except BaseException:
        progress.finish()
        raise
    seconds = max(time.monotonic() - start, 1e-9)
    progress.finish(
        f"{label}: {format_bytes(done)} in {format_seconds(seconds)}, {format_bytes(done / seconds)}/s" if done else ""
    )


COPY_AGAIN = "load an older checkpoint, or copy this one again"

Place: TypeAlias = Path | str
"""A local path, or a URL of a store that fsspec supports."""
_FIXES = {
    errno.ENOSPC: "free space on the disk, or keep fewer checkpoints",
    errno.EDQUOT: "free space in your quota, or keep fewer checkpoints",
    errno.EFBIG: "raise the limit on the size of a file (`ulimit -f`)",
    errno.EACCES: "make the folder readable and writable for this user",
    errno.EPERM: "make the folder readable and writable for this user",
    errno.EROFS: "choose a folder on a writable disk",
    errno.ENOENT: "check the path",
}


_URL_AS_PATH = re.compile(r"[a-z][a-z0-9+.-]+:/(?!/)")
_FILE_URL = re.compile(r"file:(?://(?:localhost(?=/))?|(?=/))")


def place(path: str | Path) -> Place:
    """Return a `Path`, also for `file://`, or the URL of remote storage."""
    text = str(path)
    if (scheme := _FILE_URL.match(text)) is not None:
        return Path(text[scheme.end() :])
    if isinstance(path, Path) and _URL_AS_PATH.match(text):
        raise CheckpointError(
            f"{text} is a URL that pathlib has changed",
            where=text,
            why="a Path has one slash where a URL has two, and would be a folder on the local disk",
            fix="pass the URL as a string",
        )
    return text.rstrip("/") if "://" in text and isinstance(path, str) else Path(path)


def join(folder: Place, name: str) -> Place:
    """Return the path or URL of `name` in `folder`."""
    return f"{folder}/{name}" if isinstance(folder, str) else folder / name


def split(path: Place) -> tuple[Place, str]:
    """Return the folder of a path or URL, and the name in that folder."""
    if isinstance(path, Path):
        return path.parent, path.name
    folder, _, name = path.rpartition("/")
    return folder, name


def is_same_place(one: Place, other: Place) -> bool:
    """Whether two paths or URLs refer to the same place."""
    if isinstance(one, Path) and isinstance(other, Path):
        return one.resolve() == other.resolve()
    return one == other


def check_name(name: str, *, where: str) -> str:
    """Return the file name that `where` contains; raise if it is not inside the folder it is relative to."""
    pure = PurePosixPath(name)
    strange = not pure.parts or "\\" in name or "\0" in name or ":" in name or str(pure) != name
    if strange or pure.is_absolute() or ".." in pure.parts or pure.parts[0].startswith("~"):
        raise CheckpointError(
            f"the checkpoint names a file outside its folder: {name[:200]!r}",
            where=where,
            why="files of a checkpoint are inside its folder; other paths may be an attack",
            fix="get the checkpoint again from a source you trust",
        )
    return name


@contextlib.contextmanager
def os_errors(doing: str, path: Place) -> Iterator[None]:
    """Convert OS errors to a `CheckpointError`; `doing` completes "cannot ...", as in "write the file"."""
    try:
        yield
    except OSError as error:
        fix = _FIXES.get(error.errno or 0, "see the system's message; then try again")
        raise CheckpointError(f"cannot {doing}", where=str(path), why=str(error.strerror or error), fix=fix) from error


def damaged(what: str, where: object, why: str, fix: str = COPY_AGAIN) -> CheckpointError:
    """Return the error for a damaged checkpoint."""
    return CheckpointError(what, where=str(where), why=why, fix=fix)


@contextlib.contextmanager
def parsing(what: str, where: object, fix: str = COPY_AGAIN) -> Iterator[None]:
    """Convert parse errors to the error for a damaged checkpoint."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}" if type(error) is not ValueError else str(error)
        raise damaged(what, where, why[:500], fix) from None


class FileReader(contextlib.AbstractContextManager["FileReader"]):
    """A file open for reading until the context ends, or nothing refers to it; threads may share it."""

    def __init__(self, path: Place) -> None:
        self.path = path
        with os_errors("open the file", path):
            if isinstance(path, str):
                self._file: Any = _store(path)
                return
            self._file = descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._close = weakref.finalize(self, os.close, descriptor)

    def __exit__(self, *_: object) -> None:
        if isinstance(self.path, Path):
            self._close()

    def read(self, offset: int, count: int) -> bytes:
        """Return `count` bytes, starting at `offset`."""
        data = bytearray(count)
        self.read_into(offset, [memoryview(data)])
        return bytes(data)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers in order with the bytes starting at `offset`."""
        waiting = [buffer for buffer in buffers if len(buffer)]  # empty buffers may be read-only
        end = offset + sum(map(len, waiting))
        with os_errors("read the file", self.path):
            while waiting:
                if isinstance(self.path, Path):
                    count = os.preadv(self._file, waiting, offset)
                else:
                    store, path = self._file
                    count = _fill(waiting, store.cat_file(path, start=offset, end=end))
                if count == 0:
                    why = "it was truncated by a full disk, an interrupted copy or a crash"
                    raise damaged(f"the file ends before byte {end:,}", self.path, why)
                offset += count
                waiting = _drop(waiting, count)


class FileWriter(contextlib.AbstractContextManager["FileWriter"]):
    """A new file, written sequentially; it must not exist yet."""

    def __init__(self, path: Place) -> None:
        self._path = path
        self.num_bytes = 0
        """Number of bytes appended so far."""
        self._num_sent = 0
        with os_errors("create the file", path):
            if isinstance(path, str):
                store, name = _store(path)
                self._file: Any = store.open(name, "wb")  # appears when it is closed, or not at all
            else:  # O_EXCL: never follow an existing link, never overwrite an existing file
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with os_errors("close the file", self._path):
            if isinstance(self._path, Path):
                os.close(self._file)
                return
            with contextlib.ExitStack() as on_error:
                on_error.callback(self._discard, self._path)
                if kind is None:
                    self._file.close()
                    on_error.pop_all()

    def _discard(self, url: str) -> None:
        """Abort the upload; if the store shows files while they are written, remove the file."""
        store, name = _store(url)
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(Exception):  # a buffered file: closing or deleting it would upload it
            self._file.closed = True
        with contextlib.suppress(Exception):
            self._file.close()
        with contextlib.suppress(Exception):
            store.rm(name)

    def append(self, data: memoryview | bytes) -> None:
        """Append bytes."""
        self.num_bytes += len(data)
        with os_errors("write the file", self._path):
            if isinstance(self._path, str):
                self._file.write(data)
                return
            rest = memoryview(data)
            while len(rest):
                rest = rest[os.writev(self._file, [rest]) :]
            if (num_new := self.num_bytes - self._num_sent) >= _WRITEBACK_BYTES:
                # The kernel starts to write these pages to the disk, so that `sync` does not wait for the whole file.
                # It keeps them in the page cache: only clean pages would be dropped.
                os.posix_fadvise(self._file, self._num_sent, num_new, os.POSIX_FADV_DONTNEED)
                self._num_sent = self.num_bytes

    def append_blocks(self, parts: Iterable[memoryview], block_bytes: int = BLOCK_BYTES) -> tuple[int, ...]:
        """Append one sequence of bytes, given in parts; return the checksum of each block (the last may be shorter)."""
        checksums: list[int] = []
        state, room = xxhash.xxh3_64(), block_bytes
        for part in parts:
            while len(part):
                data, part = part[:room], part[room:]
                state.update(data)  # directly before the write, so that the data is in the CPU cache
                self.append(data)
                room -= len(data)
                if not room:
                    checksums.append(state.intdigest())
                    state, room = xxhash.xxh3_64(), block_bytes
        return (*checksums, state.intdigest()) if room < block_bytes else tuple(checksums)

    def rewrite_start(self, data: bytes) -> None:
        """Overwrite the start of a local file."""
        with os_errors("write the file", self._path):
            os.pwrite(self._file, data, 0)

    def sync(self) -> None:
        """Flush the file to disk; no effect for object stores."""
        if isinstance(self._path, Path):
            with os_errors("sync the file", self._path):
                os.fsync(self._file)


def _drop(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return the buffers without their first `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


def _fill(buffers: list[memoryview], data: bytes) -> int:
    """Copy the bytes into the buffers; return their number."""
    rest = memoryview(data)
    for buffer in buffers:
        part = rest[: len(buffer)]
        buffer[: len(part)] = part
        rest = rest[len(part) :]
    return len(data)


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[FileWriter]:
    """Write a file under a partial name, renamed to `path` when the block ends; after an error, remove the file."""
    partial = path.with_name(f".{path.name}.partial")
    make_folder(path.parent)
    with removed_on_error(partial):
        with FileWriter(partial) as writer:
            yield writer
            writer.sync()
        with os_errors("rename the file", path):
            os.replace(partial, path)
    sync_folder(path.parent)


@contextlib.contextmanager
def removed_on_error(partial: Path) -> Iterator[None]:
    """Remove the path on entry, and again if the block raises."""
    remove_tree(partial)
    try:
        yield
    except BaseException:
        with contextlib.suppress(CheckpointError):
            remove_tree(partial)
        raise


def write_small(path: Place, data: bytes, *, fsync: bool = True) -> None:
    """Create a file with these bytes."""
    with FileWriter(path) as writer:
        writer.append(data)
        if fsync:
            writer.sync()


def _store(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # the scheme's package is missing, or the scheme is unknown
        raise CheckpointError(
            "cannot open the store", where=url, why=str(error), fix="install the fsspec package for this kind of URL"
        ) from error


def size_of(path: Place) -> int | None:
    """Return the size of a file in bytes; None if it does not exist."""
    with os_errors("look at the file", path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if isinstance(path, Path):
            return path.stat().st_size if path.is_file() else None
        store, name = _store(path)
        info = store.info(name)
        return int(info["size"]) if info["type"] == "file" else None
    return None


def size_problem(path: Place, expected: int | None, least: int = 0) -> str:
    """Return why a file's size is wrong, as a predicate ("is missing"); empty if the size is right."""
    found = size_of(path)
    if found is None:
        return "is missing"
    if expected is not None and found != expected:
        return f"has {found:,} bytes, but {expected:,} were written"
    return f"has {found:,} bytes, but its tensors end at {least:,}" if found < least else ""


def exists(path: Place) -> bool:
    """Whether a file, folder or link of that name exists."""
    with os_errors("look at the folder", path):
        if isinstance(path, Path):
            return os.path.lexists(path)
        store, name = _store(path)
        return bool(store.exists(name))


def read_small(path: Place, limit: int) -> bytes:
    """Return the content of a file that is normally small, such as an index; raise if it is larger than `limit`."""
    size = size_of(path)
    if size is None:
        raise CheckpointError("a file of the checkpoint is missing", where=str(path), fix="check the path")
    if size > limit:
        what = f"the file has {size:,} bytes, more than the limit of {limit:,}"
        why = "it is read into memory at once, and a damaged or malicious file could exhaust the memory"
        raise damaged(what, path, why, "get the checkpoint again from a source you trust")
    with FileReader(path) as reader:
        return reader.read(0, size)


def names_in(folder: Place) -> list[str]:
    """Return the names of files and folders directly in `folder`, sorted; empty if it does not exist."""
    with os_errors("list the folder", folder), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if isinstance(folder, Path):
            return sorted(os.listdir(folder))
        store, name = _store(folder)
        store.invalidate_cache()  # listings are cached, and other ranks may have written files
        return sorted(PurePosixPath(each.rstrip("/")).name for each in store.ls(name, detail=False))
    return []


def make_folder(folder: Place) -> None:
    """Create the folder and its parents; no error if it exists."""
    with os_errors("make the folder", folder):
        if isinstance(folder, Path):
            folder.mkdir(parents=True, exist_ok=True)
        else:
            store, name = _store(folder)
            store.makedirs(name, exist_ok=True)


def sync_folder(folder: Place) -> None:
    """Flush the folder's entries to disk; no effect for object stores."""
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
    """Remove a folder recursively, or a file; no error if it does not exist."""
    with os_errors("remove the folder", path), contextlib.suppress(FileNotFoundError):
        if isinstance(path, str):
            store, name = _store(path)
            store.rm(name, recursive=True)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove_files(folder: str, names: Sequence[str]) -> None:
    """Remove files of an object store in one call; no error if they do not exist."""
    with os_errors("remove the files", folder), contextlib.suppress(FileNotFoundError):
        store, path = _store(folder)
        if names:
            store.rm([f"{path}/{name}" for name in names], recursive=True)


def move(path: Place, target: Place) -> None:
    """Rename a folder; in object stores, copy and remove it. `target` must not exist."""
    with os_errors("rename the folder", path):
        if isinstance(path, Path):
            path.rename(target)
        else:
            store, name = _store(path)
            store.mv(name, _store(str(target))[1], recursive=True)
