"""The points of a save, seen from outside: calls of the operating system that a checkpoint's writer makes.

`watch(strike)` wraps functions of `os` and `shutil` in this process and calls `strike` with the name of every point
that is reached.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

POINTS = (
    "folder-made",
    "file-created",
    "file-half-written",
    "file-written",
    "file-synced",
    "metadata-written",
    "manifest-half-written",
    "manifest-written",
    "partial-synced",
    "renamed",
    "parent-synced",
    "retired",
    "removed",
)
"""In the order in which a save, and the removal of an old checkpoint after it, reach them."""


def kill_at(point: str, *, when: Callable[[], bool] = lambda: True, with_parent: bool = False) -> None:
    """Die by SIGKILL, as a machine does, when `point` is reached and `when` is true; the parent process first."""
    assert point in POINTS

    def strike(reached: str) -> None:
        if reached == point and when():
            if with_parent:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    watch(strike)


def watch(strike: Callable[[str], None]) -> Callable[[], None]:
    """Call `strike` with every point that is reached from now on in this process; returns what ends it."""
    mkdir, open_file, writev, fsync, rename, rmtree = (
        os.mkdir,
        os.open,
        os.writev,
        os.fsync,
        os.rename,
        shutil.rmtree,
    )
    after_rename: list[str] = []

    def watched_mkdir(path: Any, *args: Any, **options: Any) -> None:
        mkdir(path, *args, **options)
        if str(path).endswith(".partial"):
            strike("folder-made")

    def watched_open(path: Any, flags: int, *args: Any, **options: Any) -> int:
        descriptor = open_file(path, flags, *args, **options)
        if flags & os.O_CREAT and str(path).endswith(".distcp"):
            strike("file-created")
        return descriptor

    def watched_writev(descriptor: int, buffers: Any) -> int:
        name = _name(descriptor)
        half = {".distcp": "file-half-written", ".json": "manifest-half-written"}.get(Path(name).suffix)
        if half is None or os.fstat(descriptor).st_size:
            return writev(descriptor, buffers)
        data = b"".join(buffers)
        first = os.write(descriptor, data[: len(data) // 2])
        strike(half)
        return first + os.write(descriptor, data[len(data) // 2 :])

    def watched_fsync(fd: Any) -> None:
        name = _name(fd)
        if name.endswith(".distcp"):
            strike("file-written")
        fsync(fd)
        points = {".distcp": "file-synced", ".metadata": "metadata-written", "manifest.json": "manifest-written"}
        for ending, point in {**points, ".partial": "partial-synced"}.items():
            if name.endswith(ending):
                strike(point)
        if after_rename and name == after_rename[-1]:
            after_rename.clear()
            strike("parent-synced")

    def watched_rename(source: Any, target: Any, **options: Any) -> None:
        rename(source, target, **options)
        if str(target).endswith(".removing"):
            strike("retired")
        elif str(source).endswith(".partial"):
            after_rename.append(os.path.realpath(Path(target).parent))
            strike("renamed")

    def watched_rmtree(path: Any, *args: Any, **options: Any) -> None:
        rmtree(path, *args, **options)
        if str(path).endswith(".removing"):
            strike("removed")

    os.mkdir, os.open, os.writev, os.fsync = watched_mkdir, watched_open, watched_writev, watched_fsync
    os.rename, shutil.rmtree = watched_rename, watched_rmtree  # pyrefly: ignore[bad-assignment]

    def end() -> None:
        os.mkdir, os.open, os.writev, os.fsync, os.rename = mkdir, open_file, writev, fsync, rename
        shutil.rmtree = rmtree

    return end


def _name(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")
