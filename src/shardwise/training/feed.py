"""The batches of a run in their order, less those that were left out because their loss was not a number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from shardwise.training.objective import Batch


class Source(Protocol):
    """What `open_data` returns, as far as it is used here."""

    def __next__(self) -> Batch:
        """This rank's rows of the next global batch."""
        ...

    def skip(self, batches: int) -> None:
        """Leave global batches out."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go there."""
        ...


class Feed:
    """Hands out one batch a step.

    Args:
        source: The loader.

    Ranks:
        Local; every rank calls the same.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.steps = 0
        """Batches handed out."""
        self.left_out: frozenset[int] = frozenset()
        """Numbers of batches that no step gets, from 0."""
        self.failure: Exception | None = None
        """Why the last batch could not be made."""
        self._latest: Batch | None = None
        self._is_ahead = False

    def fetch_first(self) -> Exception | None:
        """Make the batch of the next step already; return why it cannot be made, for all ranks to hear."""
        try:
            self._latest = self._fetch()
            self._is_ahead = True
        except Exception as error:
            return error
        return None

    def next(self) -> Batch:
        """The batch of the next step.

        If it cannot be made, `failure` says why, and the batch before is returned instead: this rank must take part in
        one more step, whose result nobody uses, until the others know. The very first failure is raised.
        """
        try:
            if not self._is_ahead:
                self._latest = self._fetch()
        except Exception as error:
            if self._latest is None:
                raise
            self.failure = error
        self._is_ahead = False
        self.steps += 1
        assert self._latest is not None
        return self._latest

    def _fetch(self) -> Batch:
        first = batch_of(self.steps - 1, self.left_out) + 1 if self.steps else 0
        wanted = batch_of(self.steps, self.left_out)
        if wanted > first:
            self.source.skip(wanted - first)
        return next(self.source)

    def leave_out(self, step: int) -> None:
        """Give the batch that this step had to no step any more; for steps that are made again.

        Args:
            step: From 0.
        """
        self.left_out |= {batch_of(step, self.left_out)}

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, and what was left out so far."""
        return {"steps": self.steps, "left_out": sorted(self.left_out), "source": self.source.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go there; what this run has left out since stays out."""
        self._is_ahead = False
        self.steps = int(state_dict["steps"])
        self.left_out |= set(state_dict["left_out"])
        self.source.load_state_dict(state_dict["source"])


def batch_of(step: int, left_out: Iterable[int]) -> int:
    """The number of the batch that a step gets, both from 0.

    >>> [batch_of(step, {1, 2}) for step in range(3)]
    [0, 3, 4]
    """
    batch = step
    for number in sorted(left_out):
        if number <= batch:
            batch += 1
    return batch
