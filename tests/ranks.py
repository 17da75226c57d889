"""Run a test on real gloo ranks: `@ranks(2)` hands it to a pool of processes that outlives the test."""

from __future__ import annotations

import inspect
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path

import psutil
import pytest

from tests.rank_process import Job, Outcome, serve

_PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "pytest",
    "tests.rank_process",
]
# For the fork server, hence for every rank: one thread each, loopback only, no compile workers.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
_START_TIMEOUT_S = 180.0
_GRACE_S = 5.0  # for the others, once one rank has failed: longer than any honest lag between ranks
_REPORT_S = 60.0  # for stacks, logs, and the end of the ranks
# Meshes never give their groups back, and the threads of each group wake up all the time, also in a pool that waits.
_MAX_GROUPS = 100
_MAX_IDLE_GROUPS = 20
_MAX_STACK_LINES = 40
_MANY_RANKS = 4
_pools: dict[int, Pool] = {}


def ranks(num_ranks: int, timeout_s: float = 120.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test on `num_ranks` gloo ranks, each of which receives its `rank`.

    Fixtures and parameters reach the ranks by pickle. A failure carries the traceback and the number of the
    rank; after `timeout_s` the ranks that have not returned are named, with their stacks, and the pool is
    rebuilt. Tests on four ranks or more count as slow: that is two for each core.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(**arguments: object) -> None:
            _pool(num_ranks).run(test, arguments, timeout_s)

        # Not functools.wraps: pytest would follow __wrapped__ and take `rank` for a fixture.
        signature = inspect.signature(test)
        parameters = [p for name, p in signature.parameters.items() if name != "rank"]
        run.__signature__ = signature.replace(parameters=parameters)  # pyrefly: ignore[missing-attribute]
        run.__name__, run.__qualname__ = test.__name__, test.__qualname__
        run.__module__, run.__doc__ = test.__module__, test.__doc__
        marks = list(getattr(test, "pytestmark", []))
        if num_ranks >= _MANY_RANKS:
            marks.append(pytest.mark.slow.mark)
        run.pytestmark = marks  # pyrefly: ignore[missing-attribute]
        run.place_as = test  # pyrefly: ignore[missing-attribute]  # where pytest says the test is
        run.on_each_rank = test  # pyrefly: ignore[missing-attribute]  # what a rank looks up by name
        # Of the whole test: longer than the pool takes to name the ranks that hang.
        run.limit_s = _START_TIMEOUT_S + timeout_s + _REPORT_S  # pyrefly: ignore[missing-attribute]
        return run

    return decorate


def shut_down_pools() -> None:
    """End every rank of every pool."""
    for pool in list(_pools.values()):
        pool.stop()
    _pools.clear()


def stop_idle_pools(busy: int | None = None) -> None:
    """End the ranks of pools that would take much of a core beside a test on `busy` ranks, or on none."""
    for pool in _pools.values():
        if pool.num_ranks != busy and pool.num_groups > _MAX_IDLE_GROUPS:
            pool.stop()


def _pool(num_ranks: int) -> Pool:
    stop_idle_pools(num_ranks)
    if num_ranks not in _pools:
        _pools[num_ranks] = Pool(num_ranks)
    return _pools[num_ranks]


class Pool:
    """`num_ranks` processes in one gloo group, started on first use and again after anything went wrong."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []
        self._folder = Path()
        self.num_groups = 0

    def run(self, test: Callable[..., None], arguments: dict[str, object], timeout_s: float) -> None:
        """Run `test` on every rank; fail, skip or return as the ranks did."""
        job = Job(test.__module__, inspect.getfile(test), test.__qualname__, _pickled(arguments))
        try:
            if not self._is_alive():
                self.stop()
                self._start()
            logged = [self._log(rank).stat().st_size for rank in range(self.num_ranks)]
            for connection in self._connections:
                connection.send(job)
            outcomes, trouble = self._collect(timeout_s)
            report = self._report(outcomes, trouble, logged)
        except BaseException:  # Ctrl-C or the time limit: the ranks are somewhere inside the test
            self.stop()
            raise
        same = {(outcome.status, outcome.kind) for outcome in outcomes.values()}
        self.num_groups = max((outcome.num_groups for outcome in outcomes.values()), default=0)
        if trouble or len(same) > 1 or ("leaked", "leak") in same or self.num_groups > _MAX_GROUPS:
            self.stop()
        _conclude(outcomes, trouble, report)

    def stop(self) -> None:
        """Kill the ranks; the next test starts new ones."""
        for process in self.processes:
            if process.is_alive():
                # What the rank leaked goes with it: nobody else knows these processes.
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
            process.join()
            process.close()
        for connection in self._connections:
            connection.close()
        self.processes, self._connections, self.num_groups = [], [], 0
        if self._folder != Path():
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        start_fork_server()
        self._folder = Path(tempfile.mkdtemp(prefix="shardwise-ranks-"))
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            # Not a daemon: a daemonic process may not have children of its own (a DataLoader's workers).
            process = context.Process(target=serve, args=(rank, self.num_ranks, self._folder, theirs))
            process.start()
            theirs.close()
            self.processes.append(process)
            self._connections.append(ours)
        deadline = time.monotonic() + _START_TIMEOUT_S
        for rank, connection in enumerate(self._connections):
            if not connection.poll(max(0.0, deadline - time.monotonic())) or not self._is_ready(connection):
                text = self._log(rank).read_text() if self._log(rank).exists() else ""
                self.stop()
                pytest.fail(f"rank {rank} of {self.num_ranks} did not start:\n{text}", pytrace=False)

    @staticmethod
    def _is_ready(connection: Connection) -> bool:
        try:
            return connection.recv() == "ready"
        except (EOFError, ConnectionError):
            return False

    def _is_alive(self) -> bool:
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    def _collect(self, timeout_s: float) -> tuple[dict[int, Outcome], list[str]]:
        """Wait for all outcomes; once one rank has failed or died, the others have `_GRACE_S` left."""
        outcomes: dict[int, Outcome] = {}
        trouble: list[str] = []
        waiting = dict(enumerate(self._connections))
        deadline = time.monotonic() + timeout_s
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            ready = wait(list(waiting.values()), left_s)
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                try:
                    outcomes[rank] = waiting.pop(rank).recv()
                except (EOFError, ConnectionError):
                    trouble.append(f"rank {rank} died: {self._cause_of_death(rank)}")
                if rank not in outcomes or outcomes[rank].status != "passed":
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if waiting:
            trouble.append(f"ranks {sorted(waiting)} hung: a collective was not called on every rank")
            trouble += self._stacks(list(waiting))
        return outcomes, trouble

    def _cause_of_death(self, rank: int) -> str:
        self.processes[rank].join(5)
        code = self.processes[rank].exitcode
        return signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"

    def _stacks(self, hung: list[int]) -> list[str]:
        """Ask each hung rank where it is; faulthandler answers even from inside a collective."""
        for rank in hung:
            os.kill(self.processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.3)
        texts = []
        for rank in hung:
            lines = (self._folder / f"rank{rank}.stack").read_text().splitlines()[:_MAX_STACK_LINES]
            texts.append(f"--- where rank {rank} is ---\n" + "\n".join(lines))
        return texts

    def _report(self, outcomes: dict[int, Outcome], trouble: list[str], logged: list[int]) -> str:
        parts = list(trouble)  # first: what the other ranks raise is often only its echo
        parts += [
            f"--- rank {rank} {outcome.status} ---\n{outcome.text}"
            for rank, outcome in sorted(outcomes.items())
            if outcome.status != "passed"
        ]
        for rank, start in enumerate(logged):
            text = self._log(rank).read_bytes()[start:].decode(errors="replace").strip()
            if text:
                parts.append(f"--- output of rank {rank} ---\n{text[-4000:]}")
        return "\n".join(parts)


def start_fork_server() -> None:
    """Start the process from which ranks are forked, unless it runs already."""
    multiprocessing.set_forkserver_preload(_PRELOAD)
    before = dict(os.environ)
    os.environ.update(_ENVIRONMENT)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _pickled(arguments: dict[str, object]) -> bytes:
    try:
        return pickle.dumps(arguments)
    except Exception as error:
        names = ", ".join(arguments)
        pytest.fail(f"an argument of the test ({names}) cannot be sent to the ranks: {error}", pytrace=False)


def _conclude(outcomes: dict[int, Outcome], trouble: list[str], report: str) -> None:
    statuses = {outcome.status for outcome in outcomes.values()}
    if trouble or "failed" in statuses or "leaked" in statuses:
        pytest.fail(report, pytrace=False)
    if len(statuses) > 1:
        pytest.fail(f"some ranks skipped the test and some did not\n{report}", pytrace=False)
    if statuses == {"skipped"}:
        pytest.skip(outcomes[0].text)
    if statuses == {"xfailed"}:
        pytest.xfail(outcomes[0].text)
