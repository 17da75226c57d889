"""What runs in a local rank around the target: it says that it listens, and leaves errors for the launcher."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from shardwise.launching.launchers import read_launch, set_num_restarts
from shardwise.launching.stopping import StopRequest, listen_for_good, signal_numbers

_ORPHAN_S = 600.0  # how long ranks without a launcher may take to save


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What each rank of a local group does."""

    target: str
    """`module:function`."""
    args: tuple[object, ...]
    folder: str
    """Where ranks leave errors and say that they listen."""
    path: list[str]
    """The caller's `sys.path`: a target in its own folder must be found by the ranks too."""
    stop_signals: tuple[str, ...]
    """Signals that ask the target to stop; none: it has no way to."""
    num_restarts: int
    """How often the group was started before this time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorReport:
    """An error that ended a rank."""

    at_s: float
    """When, since the epoch."""
    rank: int
    error: BaseException | None
    """None when it does not survive pickling."""
    text: str
    """Its traceback."""


def resolve_target(target: str) -> Callable[..., Any]:
    """The function that `module:function` names."""
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


def run_rank(job: Job) -> object:
    """Call the target; leave an error where the launcher finds it, and exit so that the others are stopped.

    Ranks:
        What torch's agent calls on every rank.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        # Ranks share this machine's cores; torch would give all of them to each.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // read_launch().local_world_size))
    set_num_restarts(job.num_restarts)
    sys.path[:] = job.path
    listener = _Listener(job)
    try:
        result = resolve_target(job.target)(*job.args)
        listener.finish()
        return result
    except BaseException as error:
        report = ErrorReport(
            at_s=time.time(), rank=read_launch().rank, error=_portable(error), text=traceback.format_exc()
        )
        temporary = Path(job.folder, f"{os.getpid()}.writing")
        temporary.write_bytes(pickle.dumps(report))
        temporary.rename(temporary.with_suffix(".error"))
        sys.stdout.flush()
        sys.stderr.flush()
        # Not re-raised: the agent would print it too, and exit handlers may wait for other ranks.
        os._exit(1)


def is_listening(folder: Path, pid: int) -> bool:
    """Whether a signal asks that rank to stop by now, and does not end it."""
    return _listening_file(folder, pid).exists()


def read_reports(folder: Path) -> list[ErrorReport]:
    """What ended ranks, the earliest first."""
    reports = [pickle.loads(path.read_bytes()) for path in folder.glob("*.error")]
    return sorted(reports, key=lambda report: report.at_s)


class _Listener:
    """Takes signals as stop requests, if the job has any. The second Ctrl-C is the launcher's to hear, not ours:
    a terminal sends Ctrl-C to launcher and ranks alike, so that a rank hears each one twice.

    When the launcher dies, nobody reads a result any more: a job that can stop is asked to, any other is ended.
    """

    def __init__(self, job: Job) -> None:
        self._request, self._finished, self._can_stop = StopRequest(), threading.Event(), bool(job.stop_signals)
        if self._can_stop:
            numbers = {*signal_numbers(job.stop_signals), signal.SIGINT}
            listen_for_good(self._request, dict.fromkeys(numbers, self._hear))
            _listening_file(Path(job.folder), os.getpid()).touch()
        threading.Thread(target=self._watch_launcher, name="shardwise-launcher-watch", daemon=True).start()

    def finish(self) -> None:
        """The target has returned; torch will wait until the launcher has read the result."""
        self._finished.set()

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self._request.ask(signal.Signals(number).name)

    def _watch_launcher(self) -> None:
        launcher = multiprocessing.parent_process()
        if launcher is None:
            return
        launcher.join()
        self._request.ask("the launcher died")
        if self._can_stop:
            self._finished.wait(_ORPHAN_S)
        os._exit(0 if self._finished.is_set() else 1)


def _listening_file(folder: Path, pid: int) -> Path:
    return folder / f"{pid}.listening"


def _portable(error: BaseException) -> BaseException | None:
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return None
