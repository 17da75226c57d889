"""Local ranks: start them, start them again when one dies, pass stop requests on, raise what ended them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from shardwise.launching.failures import Cause, GroupDied, find_cause
from shardwise.launching.group import Group, start_fork_server
from shardwise.launching.rank_side import Job, read_reports
from shardwise.launching.stopping import StopRequest, handlers, signal_numbers

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
    """Run a function on `num_ranks` new local ranks and return what each returned.

    Args:
        target: `module:function`, importable in a new process.
        num_ranks: How many processes to start.
        args: Picklable arguments, the same for each rank.
        max_restarts: How often all ranks are started again when one dies or loses the others. The target finds by
            itself where to go on. An error that it raises would only be raised again, and ends the ranks.
        stop_signals: Signals that ask the target to stop, by `stop_requests`; it then returns in its own time, and
            a second Ctrl-C ends it at once. Without any, SIGINT and SIGTERM end the ranks.
        tell: Hears in a line what died and what is done about it; the default prints it on stderr.

    Returns:
        The results, by rank. They travel by pickle.

    Raises:
        Exception: What the first rank that failed raised, with its rank and traceback as a note.
        EnvironmentProblem: A rank died without raising anything, once more than `max_restarts` allows.

    Ranks:
        Call it from a process that is not a rank itself.
    """
    signal_numbers(stop_signals)  # a wrong name is told before anything starts
    start_fork_server()  # imports torch while we do
    tell = tell or _print_line
    stop = StopRequest()
    group = Group(num_ranks, stop, lambda: tell(f"{stop.why}: the ranks stop after this step; Ctrl-C ends them now"))
    with _undisturbed(), _signals_to(group, stop, stop_signals):
        for num_restarts in range(max_restarts + 1):
            with tempfile.TemporaryDirectory(prefix="shardwise-launch-") as folder:
                job = Job(
                    target=target,
                    args=tuple(args),
                    folder=folder,
                    path=list(sys.path),
                    stop_signals=tuple(stop_signals),
                    num_restarts=num_restarts,
                )
                try:
                    return group.run(job)
                except GroupDied as death:
                    cause = find_cause(death.exit_codes, read_reports(Path(folder)))
            if not cause.may_pass or stop.asked or num_restarts == max_restarts:
                raise _with_history(cause, num_restarts) from None
            tell(
                f"rank {cause.rank} {cause.how}; "
                f"starting all {num_ranks} ranks again (restart {num_restarts + 1} of {max_restarts})"
            )
    raise AssertionError("the last attempt returns or raises")


def _with_history(cause: Cause, num_restarts: int) -> BaseException:
    if num_restarts:
        cause.error.add_note(f"(after {num_restarts} restart{'s' if num_restarts > 1 else ''})")
    return cause.error


@contextmanager
def _signals_to(group: Group, stop: StopRequest, stop_signals: Sequence[str]) -> Iterator[None]:
    """Signals ask to stop where the target can; a second Ctrl-C, and the others, end the ranks and this process."""
    asking = set(signal_numbers(stop_signals))

    def hear(number: int, _frame: FrameType | None) -> None:
        if number in asking and not stop.hear(number):
            return
        group.end(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number))

    # Under nohup SIGHUP is ignored, and stays so.
    ending = {number for number in _ENDING if signal.getsignal(number) != signal.SIG_IGN}
    with handlers(dict.fromkeys(ending | asking, hear)):
        yield


def _print_line(line: str) -> None:
    # A rank that was drawing a progress bar may have died with the cursor hidden.
    prefix = "\r\x1b[?25h\x1b[K" if sys.stderr.isatty() else ""
    print(f"{prefix}shardwise: {line}", file=sys.stderr, flush=True)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Give back the environment and log levels that the elastic agent takes, and keep its hands off signals."""
    environment = dict(os.environ)
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)  # we report the failure ourselves, once
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "none"  # they are ours
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        os.environ.clear()
        os.environ.update(environment)
