"""Files on a local disk, read at given bytes and written from front to back; OS errors leave as they are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from shardwise.checkpointing.storage.direct_reading import DirectReader

_MAX_VECTORS = 1024  # IOV_MAX of Linux and macOS


class LocalReader:
    """A file open for reading; threads may share it."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._direct = DirectReader(self._descriptor)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers from `offset` on; fewer bytes come back than they hold only where the file ends."""
        total = self._direct.read_into(offset, buffers)
        waiting = _drop([buffer for buffer in buffers if len(buffer)], total)
        while waiting:
            count = os.preadv(self._descriptor, waiting[:_MAX_VECTORS], offset + total)
            if count == 0:
                break
            total += count
            waiting = _drop(waiting, count)
        return total

    def close(self) -> None:
        """Give the file back."""
        self._direct.close()
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
