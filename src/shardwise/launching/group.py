"""One life of a group of local ranks, under torch's elastic agent: started, watched, asked to stop, ended."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from shardwise.launching.failures import GroupDied
from shardwise.launching.rank_side import Job, is_listening, run_rank
from shardwise.launching.stopping import StopRequest

# What a rank needs before it can do anything; the fork server imports it once for all of them.
_PRELOAD = [
    "shardwise.launching.fork_server",
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
]
_SETTLE_S = 0.3  # ranks that die of the same thing do so within this
_KILLED_S = 30.0  # a process in the kernel, as of a lost file system, may not even die of SIGKILL


class Group:
    """Local ranks, from their start to their end.

    Args:
        num_ranks: How many.
        stop: Asked when the ranks are to stop; it is passed on to them once.
        on_stop: Called when it is passed on.
    """

    def __init__(self, num_ranks: int, stop: StopRequest, on_stop: Callable[[], None]) -> None:
        self._num_ranks, self._stop, self._on_stop = num_ranks, stop, on_stop
        self._processes: Mapping[int, BaseProcess] = {}
        self._told: set[int] = set()
        self._folder = Path()
        self._is_running = False
        self._ending: BaseException | None = None

    def run(self, job: Job) -> list[Any]:
        """Start the ranks and wait for what they return, by rank.

        Raises:
            GroupDied: A rank ended early. All have ended by then.
        """
        from torch.distributed.elastic.agent.server import WorkerSpec
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

        from shardwise.compat import watched_agent

        self._folder = Path(job.folder)
        self._told.clear()
        self._processes, self._is_running = {}, True
        rendezvous = _local_rendezvous()
        spec = WorkerSpec(
            role="rank",
            local_world_size=self._num_ranks,
            entrypoint=run_rank,
            args=(job,),
            rdzv_handler=rendezvous,
            max_restarts=0,  # whether to start again is decided by what died, in local.py
            monitor_interval=0.1,
            local_addr="127.0.0.1",
        )
        agent = watched_agent(
            self._watch, spec=spec, logs_specs=DefaultLogsSpecs(log_dir=job.folder), start_method="forkserver"
        )
        try:
            outcome = agent.run()
        finally:
            self.kill()
            self._is_running = False
            rendezvous.shutdown()
        if outcome.is_failed():  # a rank died between our look and the agent's
            raise GroupDied({rank: failure.exitcode for rank, failure in outcome.failures.items()})
        return [outcome.return_values[rank] for rank in range(self._num_ranks)]

    def end(self, error: BaseException) -> None:
        """End every rank at once and raise; while they are being started, as soon as they are known."""
        self._ending = error
        if self._processes or not self._is_running:
            self.kill()
            raise error

    def kill(self) -> None:
        """End every rank at once; nothing happens when they have ended."""
        for process in self._processes.values():
            if process.exitcode is None:
                process.kill()
        for process in self._processes.values():
            process.join(_KILLED_S)

    def _watch(self, processes: Mapping[int, BaseProcess]) -> None:
        """Called by the agent, ten times a second, before it looks at the ranks itself.

        A rank that has returned waits for the agent to take its result: one that is gone has failed. The agent would
        end the others by SIGTERM, which asks them to stop; they may wait for the dead one.
        """
        self._processes = processes
        if self._ending is not None:
            self.end(self._ending)
        if any(process.exitcode is not None for process in processes.values()):
            time.sleep(_SETTLE_S)
            exit_codes = {rank: process.exitcode for rank, process in processes.items() if process.exitcode is not None}
            self.kill()
            raise GroupDied(exit_codes)
        if self._stop.asked:
            self._pass_on()

    def _pass_on(self) -> None:
        if not self._told:
            self._on_stop()
        for rank, process in self._processes.items():
            if rank not in self._told and process.pid is not None and is_listening(self._folder, process.pid):
                os.kill(process.pid, signal.Signals[self._stop.why])
                self._told.add(rank)


def start_fork_server() -> None:
    """Start the process from which ranks are forked; it imports torch while this one does."""
    multiprocessing.set_forkserver_preload(_PRELOAD)
    multiprocessing.forkserver.ensure_running()


def _local_rendezvous() -> Any:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    return get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint="127.0.0.1:0",
            run_id=f"shardwise-{os.getpid()}-{time.monotonic_ns()}",
            min_nodes=1,
            max_nodes=1,
            local_addr="127.0.0.1",
        )
    )
