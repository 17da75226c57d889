"""Start local ranks, monitor them, and restart them after a failure."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import pkgutil
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from shardwise.distributed.launchers import Launch, local_environment, read_launch
from shardwise.distributed.stop_requests import StopRequest, handlers, listen_until_exit, signal_numbers
from shardwise.errors import EnvironmentProblem, ShardwiseError

_ORPHAN_S = 600.0  # time to save for ranks whose launcher has died


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorReport:
    """An error that ended a rank."""

    at_s: float
    """Seconds since the epoch."""
    rank: int
    error: BaseException | None
    """None if it cannot be pickled."""
    text: str
    """Its traceback."""


def run_rank(
    target: str,
    args: Sequence[object],
    path: Sequence[str],
    stop_signals: Sequence[str],
    environment: Mapping[str, str],
    launcher: connection.Connection,
) -> None:
    """The main function of every rank's process: call the target; send its result, or an error, to the launcher.

    `path` is the caller's `sys.path`, so that ranks find a target in the caller's folder.
    """
    import torch

    os.environ.update(environment)
    launch = read_launch()
    if "OMP_NUM_THREADS" not in os.environ:
        # Ranks share this machine's cores; by default torch uses all of them in each rank.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // launch.local_world_size))
    sys.path[:] = path
    finished = _listen(stop_signals, launcher)
    try:
        result = pkgutil.resolve_name(target)(*args)
        with contextlib.suppress(BrokenPipeError):  # the launcher has died
            launcher.send(("result", result))
        finished.set()
    except BaseException as error:
        try:
            error_sent = pickle.loads(pickle.dumps(error))
        except Exception:
            error_sent = None
        report = ErrorReport(at_s=time.time(), rank=launch.rank, error=error_sent, text=traceback.format_exc())
        with contextlib.suppress(BrokenPipeError):
            launcher.send(("error", report))
        sys.stdout.flush()
        sys.stderr.flush()
        # Not re-raised: the launcher reports it, and exit handlers may wait for other ranks.
        os._exit(1)


def _listen(stop_signals: Sequence[str], launcher: connection.Connection) -> threading.Event:
    """Treat signals as stop requests, if any; return the event to set when the target returns.

    The launcher handles the second Ctrl-C, because a terminal sends Ctrl-C to the launcher and the ranks. When the
    launcher dies, a job with stop signals gets a stop request; any other job ends at once.
    """
    request, finished = StopRequest(), threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        request.ask(signal.Signals(number).name)

    def watch_launcher() -> None:
        if (parent := multiprocessing.parent_process()) is None:
            return
        parent.join()
        request.ask("the launcher died")
        if stop_signals:
            finished.wait(_ORPHAN_S)
        os._exit(0 if finished.is_set() else 1)

    if stop_signals:
        listen_until_exit(request, dict.fromkeys({*signal_numbers(stop_signals), signal.SIGINT}, on_signal))
        launcher.send(("listening", None))
    threading.Thread(target=watch_launcher, name="shardwise-launcher-watch", daemon=True).start()
    return finished


# Messages of torch and gloo about a lost rank; not all have a specific exception type.
_LOST_PEER = re.compile(
    r"connection (closed|reset|refused|timed out)|broken pipe|remote process exited|socket (closed|timeout)"
    r"|watchdog|ncclremoteerror|failed to recv|heartbeat",
    re.IGNORECASE,
)
_DEAD_RANK = re.compile(r"rank \d+ died in step")  # from `guard`
_OUT_OF_MEMORY = re.compile(
    r"rank \d+ ran out of memory in step"
)  # from micro-batching, where a restart needs less memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """Why a group of ranks ended."""

    rank: int
    how: str
    """As in "was killed by SIGKILL"."""
    error: BaseException
    """Raised unless the ranks are restarted."""
    may_pass: bool
    """Whether a restart may help: the rank died, lost the others, or restarts with less memory."""


def find_cause(exit_codes: Mapping[int, int], reports: Sequence[ErrorReport]) -> Cause:
    """Return the first failure; those of the other ranks are consequences.

    A signal comes from outside and is always first. SIGABRT and an exit without an error may also be the end of a
    rank that lost a peer: an error of another rank has precedence.
    """
    reported = {report.rank for report in reports}
    silent = {rank: code for rank, code in exit_codes.items() if rank not in reported}
    for rank, code in silent.items():
        if code < 0 and -code != signal.SIGABRT:  # SIGABRT may follow from a lost peer
            return _death(rank, code)
    for report in reports:
        if not is_lost_peer(report.error, report.text):
            is_smaller_next_time = _OUT_OF_MEMORY.match(getattr(report.error, "what", "")) is not None
            return _raised(report, may_pass=is_smaller_next_time)
    for rank, code in silent.items():
        return _death(rank, code)
    return _raised(reports[0], may_pass=True)


def is_lost_peer(error: BaseException | None, text: str) -> bool:
    """Whether a rank failed because it lost another rank or its device."""
    if isinstance(error, ShardwiseError):
        return _DEAD_RANK.match(error.what) is not None
    import torch

    if isinstance(error, (torch.distributed.DistError, torch.AcceleratorError, ConnectionError)):
        return True
    last_line = (text.strip().splitlines() or [""])[-1]
    return isinstance(error, (RuntimeError, type(None))) and _LOST_PEER.search(f"{error}\n{last_line}") is not None


def lost_peer(error: BaseException, launch: Launch) -> EnvironmentProblem:
    """The error of a rank that lost the others; its launcher reports why they ended."""
    if isinstance(error, ShardwiseError):
        return EnvironmentProblem(error.what, where=error.where, why=error.why, fix=error.fix)
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return EnvironmentProblem(
        f"rank {launch.rank} lost another rank: {first_line}",
        where=f"rank {launch.rank} of {launch.world_size}",
        why="a rank died, or its machine cannot be reached; the others cannot continue",
        fix="find the first failed rank in the launcher's output; run the same command again to resume from the last "
        "checkpoint (torchrun --max-restarts does so automatically)",
    )


def _death(rank: int, code: int) -> Cause:
    how = f"ended with status {code}"
    if code < 0:
        names = {int(number): number.name for number in signal.Signals}  # not all real-time signals have one
        how = f"was killed by {names.get(-code, f'signal {-code}')}"
    error = EnvironmentProblem(
        f"rank {rank} {how}",
        where=f"rank {rank}",
        why="it did not end by a Python error; SIGKILL usually means out of memory",
        fix="read its last output; try fewer ranks or a smaller model if memory may be the cause",
    )
    return Cause(rank=rank, how=how, error=error, may_pass=True)


def _raised(report: ErrorReport, *, may_pass: bool) -> Cause:
    last_line = report.text.strip().splitlines()[-1]
    error = report.error if report.error is not None else RuntimeError(last_line)
    error.add_note(f"(raised on rank {report.rank})\n{report.text}")
    return Cause(rank=report.rank, how=f"raised {last_line}", error=error, may_pass=may_pass)


# Modules that the fork server imports once for all ranks.
_PRELOAD = [
    "shardwise.distributed.fork_server",
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
]
_SETTLE_S = 0.3  # ranks with a common cause of failure die within this time
_LOOK_S = 0.1
_KILLED_S = 30.0  # a process blocked in the kernel may survive SIGKILL


class RankGroup:
    """A group of local ranks; a stop request is forwarded once, and `on_stop` called."""

    def __init__(self, num_ranks: int, stop: StopRequest, on_stop: Callable[[], None]) -> None:
        self._num_ranks, self._stop, self._on_stop = num_ranks, stop, on_stop
        self.ending: BaseException | None = None
        """If set, every rank is ended and this is raised."""
        self._processes: dict[int, BaseProcess] = {}
        self._heard: dict[str, dict[int, Any]] = {}
        self._has_announced_stop = False

    def run(self, job: Sequence[object], num_restarts: int) -> list[Any] | Cause:
        """Start the ranks with the first arguments of `run_rank`; return their results, or the cause of a failure."""
        from torch.distributed import TCPStore

        self._processes, self._heard = {}, {"listening": {}, "signaled": {}, "result": {}, "error": {}}
        lines: dict[int, connection.Connection] = {}
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives every rank
        forkserver = multiprocessing.get_context("forkserver")
        try:
            for rank in range(self._num_ranks):
                environment = local_environment(rank, self._num_ranks, store.port, num_restarts)
                lines[rank], theirs = forkserver.Pipe(duplex=False)
                self._processes[rank] = forkserver.Process(target=run_rank, args=(*job, environment, theirs))
                with theirs:
                    self._processes[rank].start()
            running: list[BaseProcess] = list(self._processes.values())
            while running:
                connection.wait([process.sentinel for process in running], _LOOK_S)
                if self.ending is not None:
                    raise self.ending
                running = [process for process in running if process.exitcode is None]
                if self._failed(lines):
                    time.sleep(_SETTLE_S)
                    failed = self._failed(lines)
                    return find_cause(failed, sorted(self._heard["error"].values(), key=lambda report: report.at_s))
                if self._stop.asked:
                    self._pass_on()
            return [self._heard["result"][rank] for rank in range(self._num_ranks)]
        finally:
            started = [process for process in self._processes.values() if process.pid is not None]
            for process in started:
                if process.exitcode is None:
                    process.kill()
            for process in started:
                process.join(_KILLED_S)
            for line in lines.values():
                line.close()

    def _failed(self, lines: Mapping[int, connection.Connection]) -> dict[int, int]:
        """Read the messages of all ranks; return the exit codes of those that ended without a result."""
        ended = {rank: process.exitcode for rank, process in self._processes.items() if process.exitcode is not None}
        for rank, line in lines.items():
            with contextlib.suppress(EOFError, ConnectionError):  # the rank has ended, perhaps within a message
                while line.poll():
                    what, content = line.recv()
                    self._heard[what][rank] = content
        return {rank: code for rank, code in ended.items() if rank not in self._heard["result"]}

    def _pass_on(self) -> None:
        if not self._has_announced_stop:  # ranks that are still starting are signaled later
            self._has_announced_stop = True
            self._on_stop()
        for rank in self._heard["listening"].keys() - self._heard["signaled"].keys():
            self._heard["signaled"][rank] = None
            if (pid := self._processes[rank].pid) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.Signals[self._stop.why])


def start_fork_server() -> None:
    """Start the process from which ranks are forked; both import torch at the same time."""
    multiprocessing.set_forkserver_preload(_PRELOAD)
    multiprocessing.forkserver.ensure_running()


_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def start_local(
    target: str,
    num_ranks: int,
    args: Sequence[object] = (),
    *,
    max_restarts: int = 0,
    stop_signals: Sequence[str] = (),
    tell: Callable[[str], None] | None = None,
) -> list[Any]:
    """Run a function on `num_ranks` new local ranks and return the results by rank.

    Args:
        target: `module:function`, importable in a new process.
        num_ranks: Number of processes to start.
        args: Picklable arguments, the same for each rank.
        max_restarts: Maximum number of restarts of all ranks after one dies or loses the others. The target must
            resume by itself. An error that it raises would only recur, so it ends the ranks.
        stop_signals: Signals that become stop requests in the target (`stop_requests`); it then returns when it is
            ready, and a second Ctrl-C ends it at once. Without any, SIGINT and SIGTERM end the ranks.
        tell: Receives a line about each failed rank and restart; the default prints it on stderr.

    Raises:
        Exception: The error of the first failed rank, with its rank and traceback as a note.
        EnvironmentProblem: A rank died without an exception, after `max_restarts` restarts.
    """
    signal_numbers(stop_signals)  # raises for an unknown name
    start_fork_server()  # imports torch concurrently with this process
    tell = tell or _print_line
    stop = StopRequest()
    group = RankGroup(
        num_ranks, stop, lambda: tell(f"{stop.why}: the ranks stop after the next step; Ctrl-C ends them now")
    )
    job = (target, tuple(args), list(sys.path), tuple(stop_signals))
    with _signals_to(group, stop, stop_signals):
        for num_restarts in range(max_restarts + 1):
            outcome = group.run(job, num_restarts)
            if not isinstance(outcome, Cause):
                return outcome
            if not outcome.may_pass or stop.asked or num_restarts == max_restarts:
                if num_restarts:
                    outcome.error.add_note(f"(after {num_restarts} restart{'s' if num_restarts > 1 else ''})")
                raise outcome.error
            tell(
                f"rank {outcome.rank} {outcome.how}; "
                f"starting all {num_ranks} ranks again (restart {num_restarts + 1} of {max_restarts})"
            )
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def _signals_to(group: RankGroup, stop: StopRequest, stop_signals: Sequence[str]) -> Iterator[None]:
    """Turn stop signals into a request; a second Ctrl-C and other signals end the ranks and this process."""
    asking = set(signal_numbers(stop_signals))

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if number in asking and not stop.record(number):
            return
        group.ending = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)

    # Keep ignored signals ignored, such as SIGHUP under nohup.
    ending = {number for number in _ENDING if signal.getsignal(number) != signal.SIG_IGN}
    with handlers(dict.fromkeys(ending | asking, on_signal)):
        yield


def _print_line(line: str) -> None:
    # Show the cursor: a rank may have died while its progress bar hid it.
    prefix = "\r\x1b[?25h\x1b[K" if sys.stderr.isatty() else ""
    print(f"{prefix}shardwise: {line}", file=sys.stderr, flush=True)
