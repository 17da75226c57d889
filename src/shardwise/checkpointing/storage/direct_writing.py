"""Write a large new file past the page cache: the disk takes it from our buffers while the next are filled.

Such a file is read back once, days later, on another machine; until then it would only push what training needs out
of the cache, and writing it twice (to the cache, then to the disk) takes longer than writing it once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import threading
from collections.abc import Sequence
from pathlib import Path

from shardwise.checkpointing.storage.disk_buffers import ALIGNMENT, disk_buffer
from shardwise.checkpointing.storage.memory import copy_bytes

_BUFFER_BYTES = 8 << 20
_NUM_BUFFERS = 3


class DirectFile:
    """A new file, written from front to back by a thread of its own.

    Args:
        path: Must not be there yet.

    Raises:
        OSError: The system refuses; `EINVAL` when the file system has no direct writes.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(_NUM_BUFFERS):
            self._free.put(disk_buffer(_BUFFER_BYTES))
        self._full: queue.SimpleQueue[tuple[memoryview, int] | None] = queue.SimpleQueue()
        self._error: OSError | None = None
        self._buffer, self._filled, self._num_bytes = self._free.get(), 0, 0
        self._thread = threading.Thread(target=self._write_all, name="shardwise-write")
        self._thread.start()

    def append(self, buffers: Sequence[memoryview | bytes]) -> None:
        """Write the buffers after what is there; they are free for other use when this returns."""
        for source in map(memoryview, buffers):
            taken = 0
            while taken < len(source):
                count = min(len(source) - taken, _BUFFER_BYTES - self._filled)
                copy_bytes(self._buffer[self._filled : self._filled + count], source[taken : taken + count])
                self._filled += count
                taken += count
                if self._filled == _BUFFER_BYTES:
                    self._hand_over()
            self._num_bytes += len(source)

    def sync(self) -> None:
        """Return once the disk has it all."""
        self._finish()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Give the file back; what an error left unwritten stays so."""
        try:
            self._finish()
        finally:
            os.close(self._descriptor)

    def _hand_over(self) -> None:
        self._full.put((self._buffer, self._filled))
        self._buffer, self._filled = self._free.get(), 0
        self._raise_error()

    def _finish(self) -> None:
        """Write the last, ragged buffer and wait for all."""
        if self._thread.is_alive():
            padded = -(-self._filled // ALIGNMENT) * ALIGNMENT
            self._buffer[self._filled : padded] = bytes(padded - self._filled)
            self._full.put((self._buffer, padded))
            self._full.put(None)
            self._thread.join()
            if self._error is None:
                os.ftruncate(self._descriptor, self._num_bytes)
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write_all(self) -> None:
        """What the thread does: write full buffers, hand them back; after an error, only hand them back."""
        while (job := self._full.get()) is not None:
            buffer, count = job
            if self._error is None:
                try:
                    self._write(buffer[:count])
                except OSError as error:
                    self._error = error
            self._free.put(buffer)

    def _write(self, data: memoryview) -> None:
        while data:
            try:
                count = os.write(self._descriptor, data)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct():
                    raise
                count = 0
            if count % ALIGNMENT or count == 0:  # cut short, or refused: go on through the page cache
                self._stop_being_direct()
            data = data[count:]

    def _is_direct(self) -> bool:
        return bool(fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))

    def _stop_being_direct(self) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))
