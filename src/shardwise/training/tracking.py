"""Programs that show metrics: TensorBoard and Weights & Biases, each an extra that may be absent."""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from shardwise.config.run import MetricsConfig
from shardwise.errors import EnvironmentProblem


class Tracker(Protocol):
    """Gets every record of a run."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Take a record over."""
        ...

    def close(self) -> None:
        """Send or write what is left."""
        ...


def open_trackers(config: MetricsConfig, folder: Path, steps_done: int) -> list[Tracker]:
    """The trackers that the config names.

    Args:
        config: Which.
        folder: Of the run; trackers keep their files in folders inside.
        steps_done: Where the run goes on.

    Raises:
        EnvironmentProblem: One of them is not installed.

    Ranks:
        Local: call it on rank 0.
    """
    trackers: list[Tracker] = []
    if config.tensorboard:
        trackers.append(TensorBoard(folder / "tensorboard", steps_done))
    if config.wandb is not None:
        trackers.append(WeightsAndBiases(config.wandb, folder))
    return trackers


class TensorBoard:
    """Writes event files.

    Args:
        folder: Where.
        steps_done: Events of later steps, from before a resume, are hidden.
    """

    def __init__(self, folder: Path, steps_done: int) -> None:
        _import("tensorboard", "metrics.tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=steps_done + 1 if steps_done else None)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Add each number as a scalar."""
        for name, value in _numbers(values).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WeightsAndBiases:
    """Sends records to a project; offline where `wandb` itself is set so.

    Args:
        project: Its name.
        folder: Of the run, which also names it: a resumed run goes on under the same name.
    """

    def __init__(self, project: str, folder: Path) -> None:
        wandb = _import("wandb", "metrics.wandb", "wandb")
        name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        try:
            self._run = wandb.init(project=project, id=name, name=folder.name, dir=str(folder), resume="allow")
        except wandb.Error as error:  # not logged in, or not reachable
            raise EnvironmentProblem(
                f"wandb cannot start: {error}",
                where="metrics.wandb",
                why="rank 0 sends the run's records to it",
                fix="wandb login, or set WANDB_MODE=offline to keep them here",
            ) from None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Send the numbers."""
        self._run.log(_numbers(values), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def _import(module: str, where: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EnvironmentProblem(
            f"{module} is not installed ({error})",
            where=where,
            why="the run's config asks for it, and it is an extra of shardwise",
            fix=f"pip install 'shardwise[{extra}]', or leave {where} out: metrics.jsonl is always written",
        ) from None


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    }
