"""Find, read, write and process source files."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from shardwise.errors import SourceError
from shardwise.progress import NoProgress, Progress

STDIN = "-"
_EXCLUDED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "__pypackages__"})
_OUTPUT_FOLDERS = frozenset({"env", "build", "dist", "_build"})
"""Also excluded, unless they directly contain Python files and are therefore packages."""
_WORTH_A_POOL_BYTES = 300_000  # below this, starting processes takes longer than reading the files
_T = TypeVar("_T")


def find_files(
    paths: Iterable[str | Path], suffixes: Collection[str], is_excluded: Callable[[str], bool] = lambda path: False
) -> list[str]:
    """Return the files at these paths, in order and without repetitions; folders are searched for the suffixes.

    Raises:
        SourceError: A path does not exist.
    """
    found: dict[str, None] = {}
    for path in map(str, paths):
        if path != STDIN and not os.path.exists(path):
            raise SourceError(f"no such file or folder: {path}", where=path, fix="pass paths that exist")
        if os.path.isdir(path):
            found.update(dict.fromkeys(sorted(_search(path, suffixes, is_excluded))))
        elif path == STDIN or not is_excluded(path):
            found[path] = None
    return list(found)


def _search(folder: str, suffixes: Collection[str], is_excluded: Callable[[str], bool]) -> Iterator[str]:
    for current, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in _EXCLUDED_FOLDERS
            and not (name in _OUTPUT_FOLDERS and not _has_code(os.path.join(current, name)))
            and not os.path.exists(os.path.join(current, name, "pyvenv.cfg"))
            and not is_excluded(os.path.join(current, name))
        ]
        for name in files:
            path = os.path.join(current, name)
            if os.path.splitext(name)[1] in suffixes and not is_excluded(path):
                yield path


def _has_code(folder: str) -> bool:
    return any(name.endswith(".py") for name in os.listdir(folder))


def read_bytes(path: str) -> bytes:
    """Return the bytes of a file, or of standard input.

    Raises:
        SourceError: The file cannot be read.
    """
    if path == STDIN:
        return sys.stdin.buffer.read()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SourceError(f"cannot be read: {error.strerror}", where=f"{path}:1:1") from None


def write_bytes(path: str, data: bytes) -> None:
    """Replace a file's content atomically; keep its mode, and a symbolic link to it.

    Raises:
        SourceError: The file cannot be written; it is unchanged.
    """
    target = os.path.realpath(path)
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".shardwise-")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except OSError as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        what = f"cannot be written: {error.strerror or error}"
        raise SourceError(what, where=path, fix="check the folder's permissions") from None


_work: list[Callable[[str], Any]] = []  # in a worker process


def map_files(
    work: Callable[[str], _T],
    files: Sequence[str],
    *,
    num_processes: int | None = None,
    progress: Progress | None = None,
    label: str = "files",
) -> list[_T]:
    """Return the results of `work` in the order of the files; uses several processes if that is faster and safe.

    Args:
        work: Inherited by forked processes, so it is not pickled.
        files: Paths of the files.
        num_processes: Default: one per CPU core, if the files are large enough.
        progress: Advanced after each file.
        label: Label of the progress.
    """
    progress, results = progress or NoProgress(), []
    progress.start(len(files), label)
    for result in _results(work, files, num_processes):
        progress.advance()
        results.append(result)
    progress.finish()
    return results


def _results(work: Callable[[str], _T], files: Sequence[str], num_processes: int | None) -> Iterator[_T]:
    wanted = num_processes or min(os.cpu_count() or 1, 16)
    if wanted == 1 or not can_fork() or (num_processes is None and not _are_large(files)):
        yield from map(work, files)
        return
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(wanted, mp_context=fork, initializer=_work.append, initargs=(work,)) as pool:
        yield from pool.map(_call, files, chunksize=max(1, min(32, len(files) // (wanted * 4))))


def _call(path: str) -> Any:
    return _work[-1](path)


def can_fork() -> bool:
    """Whether to fork: it is fast and needs no importable main module, but is unsafe if there are threads."""
    return sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules


def _are_large(files: Sequence[str]) -> bool:
    sizes = (os.path.getsize(path) for path in files if os.path.exists(path))
    return STDIN not in files and sum(sizes) > _WORTH_A_POOL_BYTES
