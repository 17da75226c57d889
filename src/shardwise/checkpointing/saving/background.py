"""The training process's end of the writer: start it, hand it memory and jobs, notice when it dies."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardwise.checkpointing.saving.arena import Arena
from shardwise.checkpointing.saving.background_writer import Advanced, Leave, UseArena, WriteFile, receive, send
from shardwise.checkpointing.storage.byte_progress import counting
from shardwise.errors import CheckpointError, EnvironmentProblem
from shardwise.progress import Progress

# The same modules as here, however this process came by them.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from shardwise.checkpointing.saving.background_writer import main; main(int(sys.argv[2]))"
)
_END_S = 10.0


class WriterProcess:
    """A process of its own that writes checkpoints.

    Raises:
        EnvironmentProblem: The system starts no process.

    Ranks:
        Local: every rank has one.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
        except OSError as error:
            ours.close()
            raise EnvironmentProblem(
                "the process that writes checkpoints in the background does not start",
                where=sys.executable,
                why=str(error),
                fix="Checkpointer(..., asynchronous=False)",
            ) from error
        self._connection = ours
        self._arena = -1

    @property
    def is_alive(self) -> bool:
        """Whether it can take a job."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._process.pid

    def run(self, job: Any, arena: Arena | None = None, progress: Progress | None = None) -> Any:
        """Have a job done, and wait for it.

        Args:
            job: One of those in `background_writer.py`.
            arena: Where its tensors lie.
            progress: Is told the bytes of a `WriteFile` as they are written.

        Raises:
            CheckpointError: What the job raised; or the process died.
        """
        if arena is not None and arena.generation != self._arena:
            self._call(UseArena(arena.num_bytes), (arena.descriptor,))
            self._arena = arena.generation
        if progress is None or not isinstance(job, WriteFile):
            return self._call(job)
        with counting(progress, job.num_bytes, "writing") as count:
            return self._call(replace(job, tells=True), count=count)

    def close(self) -> None:
        """End it; a job that it is at is finished first."""
        with contextlib.suppress(OSError):
            send(self._connection, Leave())
        self._connection.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _call(
        self, job: Any, descriptors: tuple[int, ...] = (), count: Callable[[int], None] = lambda num_bytes: None
    ) -> Any:
        uncounted: Exception | None = None
        try:
            send(self._connection, job, descriptors)
            while isinstance(message := receive(self._connection)[0], Advanced):
                try:
                    count(message.num_bytes)
                except Exception as error:  # the caller's; the answer must be taken all the same
                    uncounted = uncounted or error
            succeeded, answer = message
        except (EOFError, OSError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            raise CheckpointError(
                f"the process that writes checkpoints died (exit status {self._process.poll()})",
                where=f"process {self.pid}",
                why="it was killed, perhaps because the machine ran out of memory",
                fix="see the system's log; the next save starts a new one, and committed checkpoints are intact",
            ) from error
        if not succeeded:
            raise answer
        if uncounted is not None:
            raise uncounted
        return answer
