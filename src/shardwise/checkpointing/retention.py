"""Which checkpoints of a run are kept, and the removal of the others."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.checkpointing.formats.sharded import is_committed, read_manifest, remove_checkpoint
from shardwise.checkpointing.storage.files import Place
from shardwise.errors import CheckpointError, ConfigError

_log = logging.getLogger("shardwise.checkpointing")


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """What is kept: a checkpoint stays if any of these wants it."""

    keep_last: int | None = 3
    """Number of latest checkpoints to keep; None keeps all."""
    keep_every: int | None = None
    """Those whose step is a multiple of this."""
    keep_best: int | None = None
    """Number of checkpoints with the best metric to keep."""
    best: Literal["min", "max"] = "min"
    """Which metric is better."""

    def __post_init__(self) -> None:
        limits = {"keep_last": self.keep_last, "keep_every": self.keep_every, "keep_best": self.keep_best}
        wrong = {name: value for name, value in limits.items() if value is not None and value < 1}
        if wrong or self.best not in ("min", "max"):
            raise ConfigError(
                ", ".join(f"{name} is {value}" for name, value in wrong.items()) or f"best is {self.best!r}",
                where="Checkpointer(...)",
                why="the newest checkpoint is always kept, and numbers count checkpoints or steps",
                fix="pass positive numbers, None to leave a rule out, and best='min' or 'max'",
            )


def removable(
    steps: Collection[int], newest: int, retention: Retention, metrics: Mapping[int, float] | None = None
) -> list[int]:
    """The steps whose checkpoints may be removed, oldest first.

    Args:
        steps: Of all committed checkpoints.
        newest: The one that was committed last, which always stays; steps of an earlier run may be higher.
        retention: What to keep.
        metrics: Of those that have one. Those that are not numbers (NaN) are never the best.
    """
    if retention.keep_last is None or newest not in steps:
        return []
    kept = {newest}
    kept.update(sorted(step for step in steps if step != newest)[::-1][: retention.keep_last - 1])
    if retention.keep_every is not None:
        kept.update(step for step in steps if step % retention.keep_every == 0)
    if retention.keep_best is not None:
        sign = 1 if retention.best == "min" else -1
        ranked = [(sign * value, -step) for step, value in (metrics or {}).items() if step in steps and value == value]
        kept.update(-step for _, step in sorted(ranked)[: retention.keep_best])
    return sorted(set(steps) - kept)


class Retainer:
    """Removes the checkpoints of a run that its `Retention` does not keep; those of other runs stay.

    A run's checkpoints are those that it saved, and those that were there when it resumed from one of them.
    """

    def __init__(self, retention: Retention) -> None:
        self._retention = retention
        self._metrics: dict[int, float | None] = {}  # None: it has none
        self._own: set[int] = set()
        self._has_warned = False

    def add(self, step: int, metric: float | None) -> None:
        """Count a step as the run's own: it is being saved."""
        self._own.add(step)
        self._metrics[step] = metric

    def adopt(self, steps: Iterable[int]) -> None:
        """Count steps as the run's own: it has resumed from one of them."""
        self._own.update(steps)

    def retire(self, present: Mapping[int, Place], newest: int) -> None:
        """Remove what need not be kept, on rank 0; where that fails, only warn: the newest checkpoint is whole.

        Args:
            present: Every checkpoint in the folder, by step.
            newest: The step that was saved last.
        """
        others = sorted(present.keys() - self._own)
        if others and self._retention.keep_last is not None and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s: this run has neither saved nor loaded the checkpoints of steps %s; they are kept. Load one of "
                "them to continue that run, or use another folder",
                present[newest],
                others,
            )
        own = [step for step in present if step in self._own]
        if self._retention.keep_best is not None:
            self._metrics |= {step: _metric(present[step]) for step in own if step not in self._metrics}
        metrics = {step: metric for step, metric in self._metrics.items() if metric is not None}
        for step in removable(own, newest, self._retention, metrics):
            try:
                remove_checkpoint(present[step])
            except CheckpointError as error:
                _log.warning("an old checkpoint could not be removed: %s", error)


def _metric(checkpoint: Place) -> float | None:
    """The metric that a checkpoint was saved with; None where it cannot be read."""
    try:
        return read_manifest(checkpoint).details.get("metric") if is_committed(checkpoint) else None
    except CheckpointError:
        return None
