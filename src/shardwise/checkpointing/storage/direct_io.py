"""Reads and writes that bypass the page cache."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from shardwise.checkpointing.storage.memory import copy_bytes

ALIGNMENT = 4096
"""Of address, offset and length, for a direct read or write; enough for every disk."""
_HUGE_PAGE = 2 << 20


def disk_buffer(num_bytes: int) -> memoryview:
    """New memory that lies in as few runs of physical memory as the system can give.

    A disk takes a list of runs. Of ordinary pages, each of 4 KiB and somewhere else, a list holds a megabyte at most
    and takes the disk longer than the data do: direct writes from huge pages were measured to be 1.6 times as fast.
    """
    # Private: of shared memory there are no huge pages, unless the administrator says so.
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_PAGE
    return memoryview(memory)[start : start + num_bytes]


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


_WRITE_BUFFER_BYTES = 8 << 20
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
            self._free.put(disk_buffer(_WRITE_BUFFER_BYTES))
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
                count = min(len(source) - taken, _WRITE_BUFFER_BYTES - self._filled)
                copy_bytes(self._buffer[self._filled : self._filled + count], source[taken : taken + count])
                self._filled += count
                taken += count
                if self._filled == _WRITE_BUFFER_BYTES:
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
