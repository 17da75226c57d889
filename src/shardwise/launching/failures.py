"""Why a group of local ranks ended: which rank was first, what it died of, and whether starting again may help."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import EnvironmentProblem, ShardwiseError
from shardwise.launching.launchers import Launch
from shardwise.launching.rank_side import ErrorReport

# How torch and gloo say that another rank has gone; they have no exception of their own for all of it.
_LOST_PEER = re.compile(
    r"connection (closed|reset|refused|timed out)|broken pipe|remote process exited|socket (closed|timeout)"
    r"|watchdog|ncclremoteerror|failed to recv|heartbeat",
    re.IGNORECASE,
)
_DEAD_RANK = re.compile(r"rank \d+ died in step")  # how `guard` says it
_UNSURE = (signal.SIGABRT,)  # also how C++ ends a process whose peers have gone


class GroupDied(Exception):
    """A rank ended before its function had returned; the others were ended then.

    Args:
        exit_codes: Of the ranks that ended by themselves, by rank; negative: the signal.
    """

    def __init__(self, exit_codes: Mapping[int, int]) -> None:
        super().__init__(exit_codes)
        self.exit_codes = dict(exit_codes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """What ended a group."""

    rank: int
    how: str
    """As in "was killed by SIGKILL"."""
    error: BaseException
    """What to raise when the group is not started again."""
    may_pass: bool
    """Whether the same may go well another time: the rank died, or lost the others."""


def find_cause(exit_codes: Mapping[int, int], reports: Sequence[ErrorReport]) -> Cause:
    """The first thing that went wrong; what the other ranks died of followed from it.

    A signal comes from outside and is always first. SIGABRT and an exit without an error may also be the
    end of a rank whose peer has gone, so that an error of somebody else explains them.
    """
    reported = {report.rank for report in reports}
    silent = {rank: code for rank, code in exit_codes.items() if rank not in reported}
    for rank, code in silent.items():
        if code < 0 and -code not in _UNSURE:
            return _death(rank, code)
    for report in reports:
        if not is_lost_peer(report.error, report.text):
            return _raised(report, may_pass=False)
    for rank, code in silent.items():
        return _death(rank, code)
    return _raised(reports[0], may_pass=True)


def is_lost_peer(error: BaseException | None, text: str) -> bool:
    """Whether a rank failed because it could not reach another, or the device failed under it."""
    if isinstance(error, ShardwiseError):
        return _DEAD_RANK.match(error.what) is not None
    import torch

    if isinstance(error, (torch.distributed.DistError, torch.AcceleratorError, ConnectionError)):
        return True
    last_line = (text.strip().splitlines() or [""])[-1]
    return isinstance(error, (RuntimeError, type(None))) and _LOST_PEER.search(f"{error}\n{last_line}") is not None


def lost_peer(error: BaseException, launch: Launch) -> EnvironmentProblem:
    """The error of a rank that lost the others, under a launcher that tells why they went."""
    if isinstance(error, ShardwiseError):
        return EnvironmentProblem(error.what, where=error.where, why=error.why, fix=error.fix)
    return EnvironmentProblem(
        f"rank {launch.rank} lost another rank: {_first_line(error)}",
        where=f"rank {launch.rank} of {launch.world_size}",
        why="a rank has died, or its machine cannot be reached any more; the others cannot go on without it",
        fix="see which rank ended first in the launcher's output; start the same command again to go on from the last "
        "checkpoint (torchrun --max-restarts does so by itself)",
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _death(rank: int, code: int) -> Cause:
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with status {code}"
    error = EnvironmentProblem(
        f"rank {rank} {how}",
        where=f"rank {rank}",
        why="it did not end by a Python error; SIGKILL mostly means that memory ran out",
        fix="read its last output; start fewer ranks or a smaller model to see whether memory is the cause",
    )
    return Cause(rank=rank, how=how, error=error, may_pass=True)


def _raised(report: ErrorReport, *, may_pass: bool) -> Cause:
    last_line = report.text.strip().splitlines()[-1]
    error = report.error if report.error is not None else RuntimeError(last_line)
    error.add_note(f"(raised on rank {report.rank})\n{report.text}")
    return Cause(rank=report.rank, how=f"raised {last_line}", error=error, may_pass=may_pass)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
