"""The background process that writes checkpoints. It does not need torch."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from types import SimpleNamespace
from typing import Any

from shardwise.checkpointing.contents import LocalChunk
from shardwise.checkpointing.formats import sharded
from shardwise.checkpointing.storage import Place, bytes_of
from shardwise.errors import CheckpointError, EnvironmentProblem, ShardwiseError
from shardwise.progress import Progress

Work = Callable[[memoryview, "Progress | None"], Any]
"""A task for the process: called with the shared memory and an optional progress display. Picklable."""

# Uses this process's sys.path, so that both processes import the same modules.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from shardwise.checkpointing.background_writer import main; main(int(sys.argv[2]))"
)
_END_S = 10.0
_WATCH_S = 0.2


def write_items(
    path: Place, items: Sequence[LocalChunk], values: dict[str, Any], fsync: bool, memory: memoryview, progress: Any
) -> sharded.FileRecord:
    """Write one rank's file: tensors from buffers or shared memory, and encoded values as torch's readers expect."""
    placed = [replace(item, memory=bytes_of_item(item, memory)) for item in items]
    return sharded.write_rank_file(path, placed, sharded.value_streams(values), fsync=fsync, progress=progress)


def bytes_of_item(item: LocalChunk, memory: memoryview) -> memoryview:
    """Return an item's bytes, from its tensor or from shared memory."""
    if isinstance(item.memory, int):
        return memory[item.memory : item.memory + item.num_bytes]
    return bytes_of(item.memory)


def commit(
    folder: Place, records: Sequence[sharded.FileRecord], header: sharded.Header, fsync: bool, *_unused: object
) -> None:
    """Commit the files of all ranks as a checkpoint."""
    sharded.commit_checkpoint(folder, records, header, fsync=fsync)


class WriterProcess:
    """A process that writes checkpoints; one per rank."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-c",
                        _PROGRAM,
                        json.dumps([str(each) for each in sys.path]),
                        str(theirs.fileno()),
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
        except OSError as error:
            ours.close()
            raise EnvironmentProblem(
                "the background writer process does not start",
                where=sys.executable,
                why=str(error),
                fix="Checkpointer(..., asynchronous=False)",
            ) from error
        self.pid = self._process.pid
        self._connection = Connection(ours.detach())
        self._generation = 0

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def run(self, work: Work, arena: Any, progress: Progress | None) -> Any:
        """Run `write_items` or `commit` in the process and wait; raise its error, or an error if the process died."""
        failed: Exception | None = None
        is_new = arena.generation != self._generation
        try:
            self._connection.send((work, arena.num_bytes if is_new else 0, progress is not None))
            if is_new:
                send_handle(self._connection, arena.descriptor, self.pid)
                self._generation = arena.generation
            while (message := self._connection.recv())[0] not in ("answer", "error"):
                try:
                    getattr(progress, message[0])(*message[1])
                except Exception as error:  # raised by the caller's progress; the answer must still be received
                    failed = failed or error
        except (EOFError, OSError) as error:
            if progress is not None:
                progress.finish()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            raise CheckpointError(
                f"the background writer process died (exit status {self._process.poll()})",
                where=f"process {self.pid}",
                why="it was killed, possibly because the machine ran out of memory",
                fix="check the system log; the next save starts a new process, and committed checkpoints are intact",
            ) from error
        if message[0] == "error" or failed is not None:
            raise failed or message[1]
        return message[1]

    def close(self) -> None:
        """Finish pending work and end the process."""
        self._connection.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(connection: Connection) -> None:
    """Process requests until the connection closes."""
    memory = memoryview(b"")

    def relay(name: str, *args: object) -> None:
        connection.send((name, args))

    # A proxy of the parent's progress: every call is sent to the parent.
    progress = SimpleNamespace(**{name: partial(relay, name) for name in ("start", "advance", "finish")})
    while True:
        try:
            work, num_bytes, tells = connection.recv()
            if num_bytes:
                descriptor = recv_handle(connection)
                memory = memoryview(mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ))
                os.close(descriptor)
        except (EOFError, ConnectionError):
            return
        try:
            connection.send(("answer", work(memory, progress if tells else None)))
        except ShardwiseError as error:
            connection.send(("error", error))
        except Exception as error:
            problem = CheckpointError(f"{type(error).__name__}: {error}", where="the process that writes checkpoints")
            connection.send(("error", problem))


def main(descriptor: int) -> None:
    """Process the requests of the parent process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(5)  # gives training priority
    parent = os.getppid()

    def leave_with_parent() -> None:
        # Forked processes may keep the parent's end of the socket open, so its closing is not a reliable sign.
        while os.getppid() == parent:
            time.sleep(_WATCH_S)
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    with Connection(descriptor) as connection, contextlib.suppress(BrokenPipeError, ConnectionError):
        serve(connection)
    sys.stdout.flush()
    os._exit(0)  # no cleanup is needed, and unmapping much memory takes time
