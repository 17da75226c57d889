"""Requests to stop, from signals or when the launcher ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from shardwise.errors import ConfigError

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
"""Default signals that stop a run; schedulers send SIGTERM or SIGUSR1 before they reclaim a machine."""

_current: StopRequest | None = None


class StopRequest:
    """Stop request of this process. Other ranks may have none: agree with them before stopping."""

    def __init__(self) -> None:
        self.why = ""
        """The first reason, as in "SIGTERM"; empty without a request."""
        self._interrupted = False

    @property
    def asked(self) -> bool:
        """Whether there is a request."""
        return bool(self.why)

    def ask(self, why: str) -> None:
        """Request a stop; the first reason is kept."""
        self.why = self.why or why

    def record(self, number: int) -> bool:
        """Record a signal as a request; return whether it is the second Ctrl-C, which ends the process."""
        if number == signal.SIGINT and self._interrupted:
            return True
        self._interrupted = self._interrupted or number == signal.SIGINT
        self.ask(signal.Signals(number).name)
        return False


@contextmanager
def stop_requests(signals: Sequence[str] = STOP_SIGNALS) -> Iterator[StopRequest]:
    """Convert signals to a request inside the block.

    The first signal only sets the request. A second Ctrl-C (SIGINT) raises KeyboardInterrupt at once. A nested
    block yields the request of the outer one, which restores the handlers. Outside the main thread no handlers are
    set. A launcher may signal only some ranks: let all ranks agree before one of them stops.
    """
    global _current
    if _current is not None:
        yield _current
        return
    request = StopRequest()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if request.record(number):
            signal.default_int_handler(number, frame)

    with handlers(dict.fromkeys(signal_numbers(signals), on_signal)):
        _current = request
        try:
            yield request
        finally:
            _current = None


def listen_until_exit(request: StopRequest, wanted: Mapping[signal.Signals, Any]) -> None:
    """Let `stop_requests` yield `request`, and set handlers, until this process ends."""
    global _current
    _current = request
    for number, handler in wanted.items():
        signal.signal(number, handler)


def signal_numbers(names: Sequence[str]) -> list[signal.Signals]:
    """Signals by name; a ConfigError for one that does not exist on this system or cannot be handled."""
    numbers: list[signal.Signals] = []
    for name in names:
        number = signal.Signals.__members__.get(name)
        if number is None or number in (signal.SIGKILL, signal.SIGSTOP):
            raise ConfigError(
                f"{name!r} is not a signal that can stop a run",
                where="training.stop_signals",
                why="it must be the name of a signal that a process can handle",
                fix=f"use some of {', '.join(STOP_SIGNALS)}",
            )
        numbers.append(number)
    return numbers


@contextmanager
def handlers(wanted: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Set signal handlers inside the block and restore the old ones; no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: set by C code, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
