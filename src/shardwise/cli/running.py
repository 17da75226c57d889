"""Run a function on ranks: those of the launcher that started this process, or new local ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from shardwise.launching import read_launch, resolve_target, start_local


def run_on_ranks(target: str, num_ranks: int | None, args: Sequence[object] = ()) -> Any | None:
    """Run `module:function` on every rank; return rank 0's result, or None where this process is another.

    Under torchrun, Slurm or Ray this process is a rank already and simply calls the function; otherwise
    `num_ranks` local ranks are started, by default one a GPU, or two on CPU.

    Ranks:
        Collective when started by a launcher.
    """
    folder = os.getcwd()  # a `module:callable` of the user is looked up here, as `python -m` does
    if folder not in sys.path:
        sys.path.insert(0, folder)
    launch = read_launch()
    if launch.source != "single":
        result = resolve_target(target)(*args)
        return result if launch.rank == 0 else None
    return start_local(target, num_ranks or _default_num_ranks(), args)[0]


def _default_num_ranks() -> int:
    import torch

    return torch.accelerator.device_count() or 2
