"""The progress protocol: long work reports, somebody else renders. No output of its own."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Hears how far a piece of work has come; `report/terminal.py` draws it, tests record it."""

    def start(self, total: int, label: str) -> None:
        """Begin `total` steps of work called `label`."""

    def advance(self, steps: int = 1, note: str = "") -> None:
        """`steps` more are done; `note` is the news, such as the loss."""

    def finish(self, note: str = "") -> None:
        """The work is over, all steps done or not."""


class NoProgress:
    """Hears everything and shows nothing: for ranks other than 0, and for callers who did not ask."""

    def start(self, total: int, label: str) -> None:
        """Ignore the start."""

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Ignore the step."""

    def finish(self, note: str = "") -> None:
        """Ignore the end."""
