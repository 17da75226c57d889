"""When the program ends, by itself or by SIGTERM, a save that is being written is finished first."""

from __future__ import annotations

import atexit
import logging
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Protocol

_log = logging.getLogger("shardwise.checkpointing")


class Work(Protocol):
    """What must be finished."""

    def wait(self) -> None:
        """Finish it."""

    def close(self) -> None:
        """Finish it, and give everything back."""


class Leaving:
    """Finishes the save in the background when the program ends, by itself or by SIGTERM.

    A program that handles SIGTERM itself is left alone: however it ends, the save is finished at its exit.

    Args:
        work: Not kept alive by this.
    """

    def __init__(self, work: Work) -> None:
        self._work = weakref.ref(work)
        atexit.register(self._at_exit)
        if _is_main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def forget(self) -> None:
        """Leave the program's end alone again."""
        atexit.unregister(self._at_exit)
        # Compared by equality: a bound method is a new object each time. Somebody may have set another since.
        if _is_main_thread() and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _at_exit(self) -> None:
        if (work := self._work()) is not None:
            _finish(work.close)

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        if (work := self._work()) is not None:
            _finish(work.wait)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)


def _finish(finish: Callable[[], None]) -> None:
    try:
        finish()
    except Exception as error:  # the program ends anyway; nobody is left to catch it
        _log.error("the last save failed: %s", error)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
