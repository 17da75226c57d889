"""Run a function on the launcher's ranks, or on new local ranks."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardwise.distributed.launchers import Launch, read_launch
from shardwise.distributed.local_ranks import is_lost_peer, lost_peer, start_local
from shardwise.errors import ShardwiseError


def run_on_ranks(
    target: str,
    num_ranks: int | None,
    args: Sequence[object] = (),
    *,
    max_restarts: int = 0,
    stop_signals: Sequence[str] = (),
    everywhere: bool = False,
) -> Any | None:
    """Run `module:function` on every rank; return rank 0's result, or None in a process of another rank.

    With `everywhere`, every process returns its own rank's result, so that all can exit with the same status. Output of
    the function goes to stderr, because stdout is for the command's result.

    Under torchrun, Slurm or Ray this process is already a rank and calls the function; otherwise `num_ranks` local
    ranks are started, by default one per GPU, or two on CPU. Launchers restart ranks by their own rules;
    `max_restarts` and `stop_signals` apply to local ranks, see `start_local`.
    """
    launch = read_launch()
    with user_code():
        if launch.source != "single":
            result = _call(target, args, launch)
            return result if launch.rank == 0 or everywhere else None
        results = start_local(
            target, number_of_ranks(num_ranks), args, max_restarts=max_restarts, stop_signals=stop_signals
        )
        return results[0]


@contextlib.contextmanager
def user_code() -> Iterator[None]:
    """Make `module:callable` importable from the working folder, as in `python -m`, and redirect its stdout to stderr.

    The file descriptor is redirected as well, for child processes such as local ranks.
    """
    add_to_path(os.getcwd())
    stdout = sys.stdout
    stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        stdout.flush()  # flush writes to `sys.__stdout__`
        os.dup2(kept, 1)
        os.close(kept)


def add_to_path(folder: str | Path, *, first: bool = True) -> None:
    """Add a folder to `sys.path` for `module:callable`, before or after installed packages."""
    if str(folder) not in sys.path:
        sys.path.insert(0 if first else len(sys.path), str(folder))


def _call(target: str, args: Sequence[object], launch: Launch) -> Any:
    try:
        return pkgutil.resolve_name(target)(*args)
    except (RuntimeError, ConnectionError, ShardwiseError) as error:
        if not is_lost_peer(error, ""):
            raise
        raise lost_peer(error, launch) from error


def number_of_ranks(wanted: int | None = None) -> int:
    """Return the number of ranks of `run_on_ranks`: the launcher's, the requested, one per GPU, or two."""
    import torch

    launch = read_launch()
    if launch.source != "single":
        return launch.world_size
    return wanted or torch.accelerator.device_count() or 2
