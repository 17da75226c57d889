"""Which old checkpoints may go. Arithmetic only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """What is kept: a checkpoint stays if any of these wants it."""

    keep_last: int | None = 3
    """The newest so many; None keeps all."""
    keep_every: int | None = None
    """Those whose step is a multiple of this."""
    keep_best: int | None = None
    """So many with the best metric."""
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
