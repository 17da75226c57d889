"""The process that writes a checkpoint while training goes on."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from shardwise.checkpointing.contents import Box
from shardwise.checkpointing.formats.sharded import FileRecord, Header, Item, write_rank_file
from shardwise.checkpointing.formats.sharded_commit import commit_checkpoint
from shardwise.checkpointing.formats.values import decode_value
from shardwise.checkpointing.pickles.zip_files import value_stream
from shardwise.checkpointing.storage.files import Place
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.progress import Progress

_WATCH_S = 0.2
_TELL_S = 0.1


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """A box of a tensor and where it lies in the shared memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class UseArena:
    """From now on the tensors lie in the memory whose descriptor is sent next."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Write one rank's file."""

    path: Place
    items: tuple[PlacedItem, ...]
    values: dict[str, Any]
    """Encoded; for torch's own readers."""
    fsync: bool
    tells: bool = False
    """Send `Advanced` while it is being written."""

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(item.num_bytes for item in self.items)


@dataclass(frozen=True, slots=True)
class Commit:
    """Make what all ranks have written a checkpoint."""

    folder: Place
    records: tuple[FileRecord, ...]
    header: Header
    fsync: bool


@dataclass(frozen=True, slots=True)
class Advanced:
    """Sent before the answer: so many more bytes are written."""

    num_bytes: int


class Telling:
    """The progress of a job, told to the parent a few times a second.

    Args:
        tell: Sends a message.
    """

    def __init__(self, tell: Callable[[Advanced], object]) -> None:
        self._tell = tell
        self._untold, self._told_at = 0, time.monotonic()

    def start(self, total: int, label: str) -> None:
        """The parent knows."""

    def advance(self, steps: int = 1, note: str = "") -> None:
        """So many bytes more; the parent makes its own note of them."""
        self._untold += steps
        if time.monotonic() - self._told_at >= _TELL_S:
            self._send()

    def finish(self, note: str = "") -> None:
        """Tell what is left."""
        if self._untold:
            self._send()

    def _send(self) -> None:
        self._tell(Advanced(self._untold))
        self._untold, self._told_at = 0, time.monotonic()


def run_job(job: Any, memory: memoryview | None, progress: Progress | None = None) -> Any:
    """Do one job; also what a parent that cannot start processes does itself.

    Args:
        job: `WriteFile` or `Commit`.
        memory: Where the items of a `WriteFile` lie.
        progress: Is told the bytes as they are written.
    """
    match job:
        case WriteFile():
            values = value_streams(job.values)
            return write_rank_file(job.path, _items(job, memory), values, fsync=job.fsync, progress=progress)
        case Commit():
            return commit_checkpoint(job.folder, job.records, job.header, fsync=job.fsync)
    raise TypeError(f"no such job: {type(job).__name__}")


def value_streams(values: dict[str, Any]) -> dict[str, bytes]:
    """Encoded values as torch's own readers expect them; in their encoding where pickles have no plain form."""
    streams = {}
    for name, encoded in values.items():
        try:
            streams[name] = value_stream(decode_value(encoded))
        except (CheckpointError, TypeError, ImportError):
            streams[name] = value_stream(encoded)
    return streams


def serve(connection: Connection) -> None:
    """Answer jobs until there are no more."""
    memory: memoryview | None = None
    while True:
        try:
            job = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            if isinstance(job, UseArena):
                memory = _map(recv_handle(connection), job.num_bytes)
                answer: Any = None
            else:
                tells = isinstance(job, WriteFile) and job.tells
                progress = Telling(connection.send) if tells else None
                answer = run_job(job, memory, progress)
            connection.send((True, answer))
        except ShardwiseError as error:
            connection.send((False, error))
        except Exception as error:
            problem = CheckpointError(f"{type(error).__name__}: {error}", where="the process that writes checkpoints")
            connection.send((False, problem))


def main(descriptor: int) -> None:
    """Serve the parent at the other end of the socket."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(5)  # training first
    parent = os.getppid()
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    with Connection(descriptor) as connection, contextlib.suppress(BrokenPipeError, ConnectionError):
        serve(connection)
    sys.stdout.flush()
    os._exit(0)  # nothing to tidy up, and the mapped memory may be large


def _leave_with(parent: int) -> None:
    # Its end of the socket may live on in a process that it forked, so that we would never see the end of it.
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(1)


def _items(job: WriteFile, memory: memoryview | None) -> list[Item]:
    view = memory if memory is not None else memoryview(b"")
    return [
        Item(item.name, item.dtype, item.shape, item.box, view[item.offset : item.offset + item.num_bytes])
        for item in job.items
    ]


def _map(descriptor: int, num_bytes: int) -> memoryview:
    try:
        return memoryview(mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ))
    finally:
        os.close(descriptor)
