"""The progress protocol between long operations and renderers. No output of its own."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the progress of an operation; rendered by `report/terminal.py`."""

    def start(self, total: int, label: str) -> None:
        """Begin `total` steps of work called `label`."""

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Advance by `steps`; `note` is shown, such as the loss."""

    def finish(self, note: str = "") -> None:
        """End the operation, complete or not."""


class NoProgress:
    """Ignores all progress: for ranks other than 0, and by default."""

    def start(self, total: int, label: str) -> None:
        """Ignore the start."""

    def advance(self, steps: int = 1, note: str = "") -> None:
        """Ignore the step."""

    def finish(self, note: str = "") -> None:
        """Ignore the end."""
