"""The points of a save at which tests strike: each is reached by name, and does nothing unless a test armed it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

POINTS = (
    "folder-made",
    "file-created",
    "file-half-written",
    "file-written",
    "file-synced",
    "metadata-written",
    "manifest-half-written",
    "manifest-written",
    "partial-synced",
    "renamed",
    "parent-synced",
    "retired",
    "removed",
)
"""In the order in which a save, and the removal of an old checkpoint after it, reach them."""

_strike: Callable[[str], None] | None = None


def reach(point: str) -> None:
    """Say that `point` is reached."""
    if _strike is not None:
        _strike(point)


def arm(strike: Callable[[str], None] | None) -> None:
    """Call `strike` with the name of every point reached from now on in this process; None disarms."""
    global _strike
    _strike = strike


def kill_at(point: str, arrival: int = 1) -> None:
    """Die by SIGKILL, as a machine does, on the `arrival`-th time that `point` is reached."""
    if point not in POINTS:
        raise ValueError(f"no such point: {point}")
    arrivals = 0

    def strike(reached: str) -> None:
        nonlocal arrivals
        arrivals += reached == point
        if arrivals == arrival:
            os.kill(os.getpid(), signal.SIGKILL)

    arm(strike)
