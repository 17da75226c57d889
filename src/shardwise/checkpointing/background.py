"""The training process's end of the writer: start it, hand it memory and jobs, notice when it dies."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from typing import Any

from shardwise.checkpointing.arena import Arena
from shardwise.checkpointing.background_writer import Leave, UseArena, receive, send
from shardwise.errors import CheckpointError, EnvironmentProblem

# The same modules as here, however this process came by them.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from shardwise.checkpointing.background_writer import main; main(int(sys.argv[2]))"
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

    def run(self, job: Any, arena: Arena | None = None) -> Any:
        """Have a job done, and wait for it.

        Args:
            job: One of those in `background_writer.py`.
            arena: Where its tensors lie.

        Raises:
            CheckpointError: What the job raised; or the process died.
        """
        if arena is not None and arena.generation != self._arena:
            self._call(UseArena(arena.num_bytes), (arena.descriptor,))
            self._arena = arena.generation
        return self._call(job)

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

    def _call(self, job: Any, descriptors: tuple[int, ...] = ()) -> Any:
        try:
            send(self._connection, job, descriptors)
            (succeeded, answer), _ = receive(self._connection)
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
        return answer
