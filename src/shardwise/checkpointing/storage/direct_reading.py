"""Read large parts of a file past the page cache, where it does not hold them. No torch.

A fast disk then works at its full speed and the CPU does a third of the work. A slow disk is no slower through the
cache, and the next who reads the file is glad of it: it is left to the cache as soon as it turns out to be slow.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from shardwise.checkpointing.storage.disk_buffers import ALIGNMENT, disk_buffer
from shardwise.checkpointing.storage.memory import copy_bytes

_MIN_BYTES = 1 << 20  # shorter reads are left to the system, which reads ahead
_BUFFER_BYTES = 2 << 20  # stays in a core's own cache until it is copied on; measured to be the fastest
_NUM_TRIES = 8
_SLOW_BYTES_PER_S = 1e9  # to all threads of this process together
_of_thread = threading.local()


class DirectReader:
    """A file that can be read directly; threads may share it.

    Args:
        descriptor: Of the same file, open for ordinary reads; stays the caller's.
    """

    def __init__(self, descriptor: int) -> None:
        self._ordinary = descriptor
        self._lock = threading.Lock()
        self._descriptors: list[int] = []  # for direct reads, and to ask the page cache
        self._in_flight, self._tries, self._best_bytes_per_s = 0, 0, 0.0
        self._is_refused = not hasattr(os, "O_DIRECT") or not hasattr(os, "RWF_NOWAIT")

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers from `offset` on, as far as that is the better way.

        Returns:
            The bytes read. None where the page cache has them or the file system does not play along; fewer than the
            buffers hold where the disk is slow or the file ends. The rest is to be read in the ordinary way.
        """
        end = offset + sum(map(len, buffers))
        if end - offset < _MIN_BYTES or self._is_refused or not self._open() or self._is_cached(offset, end - 1):
            return 0
        places, at = _Places(buffers), offset
        buffer = _buffer()
        while at < end and not self._is_refused:
            start = at // ALIGNMENT * ALIGNMENT
            stop = min(start + _BUFFER_BYTES, -(-end // ALIGNMENT) * ALIGNMENT)
            try:
                count = self._read(start, buffer[: stop - start])
            except OSError:  # what is really wrong shows when it is read in the ordinary way
                break
            found = min(start + count, end) - at
            if found <= 0:
                break
            places.fill(buffer[at - start : at - start + found])
            at += found
        return at - offset

    def _read(self, start: int, buffer: memoryview) -> int:
        with self._lock:
            self._in_flight += 1
            num_threads = self._in_flight
        begin = time.perf_counter()
        try:
            count = os.preadv(self._descriptors[0], [buffer], start)
        finally:
            seconds = time.perf_counter() - begin
            with self._lock:
                self._in_flight -= 1
        if count == _BUFFER_BYTES and self._tries < _NUM_TRIES:
            self._tries += 1
            # The best counts: whatever else the machine does only makes a read slower.
            self._best_bytes_per_s = max(self._best_bytes_per_s, num_threads * count / max(seconds, 1e-9))
            self._is_refused = self._tries == _NUM_TRIES and self._best_bytes_per_s < _SLOW_BYTES_PER_S
        return count

    def close(self) -> None:
        """Give the file back."""
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _open(self) -> bool:
        """Whether the file system has direct reads; opens the file for them the first time."""
        with self._lock:
            if not self._descriptors and not self._is_refused:
                path = f"/proc/self/fd/{self._ordinary}"  # under its own path there may be another file by now
                try:
                    for flag in (os.O_DIRECT, 0):
                        self._descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag))
                    os.posix_fadvise(self._descriptors[1], 0, 0, os.POSIX_FADV_RANDOM)  # asking must not read ahead
                except OSError:
                    self._is_refused = True
            return not self._is_refused

    def _is_cached(self, first: int, last: int) -> bool:
        """Whether the page cache holds both bytes, and so surely all between them; or does not tell."""
        try:
            for offset in (first, last):
                os.preadv(self._descriptors[1], [bytearray(1)], offset, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError:  # network file systems: they had better use their cache
            self._is_refused = True
        return True


class _Places:
    """Buffers that are filled one after another."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = [buffer for buffer in buffers if len(buffer)]
        self._index = self._filled = 0

    def fill(self, data: memoryview) -> None:
        while len(data):
            buffer = self._buffers[self._index]
            count = min(len(data), len(buffer) - self._filled)
            copy_bytes(buffer[self._filled : self._filled + count], data[:count])
            self._filled += count
            data = data[count:]
            if self._filled == len(buffer):
                self._index, self._filled = self._index + 1, 0


def _buffer() -> memoryview:
    """This thread's own; it goes with the thread."""
    if not hasattr(_of_thread, "buffer"):
        _of_thread.buffer = disk_buffer(_BUFFER_BYTES)
    return _of_thread.buffer
