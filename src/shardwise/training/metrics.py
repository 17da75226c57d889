"""Metrics as JSON lines and for trackers."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from shardwise.config.run import MetricsConfig
from shardwise.distributed.agreement import raise_together
from shardwise.errors import ConfigError, EnvironmentProblem, ShardwiseError


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


FILE_NAME = "metrics.jsonl"

Value = float | int | str | bool | None


class Metrics:
    """Writes records to `metrics.jsonl` in the run's folder, and to the trackers that the config names.

    NaN and infinity become the strings `nan`, `inf` and `-inf`, which JSON has no numbers for and `float()` reads.

    Args:
        folder: Of the run; made if it is absent.
        config: Which trackers, how often.
        rank: Of this process; rank 0 writes, the others do nothing.
        steps_done: Where the run goes on; later records, left by a run that came further before it was stopped, are
            dropped. 0 begins a new file.

    Raises:
        ConfigError: The folder cannot be written.
        EnvironmentProblem: A tracker is not installed.

    Ranks:
        The constructor is collective, so that all raise the same error. The rest is local.
    """

    def __init__(self, folder: str | Path, config: MetricsConfig, rank: int, *, steps_done: int = 0) -> None:
        self.path = Path(folder) / FILE_NAME
        self.config = config
        self.latest: dict[str, Value] = {}
        """The newest record that has been written; only rank 0 has any."""
        self.on_record: Callable[[int, Mapping[str, Any]], None] | None = None
        """Hears every record, with its step, on every rank."""
        self._file: IO[str] | None = None
        self._trackers: list[TensorBoard | WeightsAndBiases] = []
        error: ShardwiseError | None = None
        if rank == 0:
            try:
                self._open(steps_done)
            except OSError as problem:
                error = ConfigError(
                    f"metrics cannot be written: {problem}",
                    where=str(self.path),
                    why="every run keeps its metrics in its folder",
                    fix="set folder to a place that this user can write to, with room left",
                )
            except ShardwiseError as problem:
                error = problem
        raise_together(error)

    def record(self, step: int, **values: Any) -> None:
        """Write a record.

        Args:
            step: Steps done so far, from 1.
            values: Numbers, strings, None, or 0-d tensors.

        Ranks:
            Local.
        """
        if self.on_record is not None:
            self.on_record(step, values)
        if self._file is None:
            return
        plain = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
        self.latest = {"step": step, "time": round(time.time(), 3), **plain}
        # One write of a whole line: a reader never sees half a record, a killed run leaves at most one.
        self._file.write(json.dumps({key: _encoded(value) for key, value in self.latest.items()}) + "\n")
        self._file.flush()
        for tracker in self._trackers:
            tracker.write(step, plain)

    def rewind(self, steps_done: int) -> None:
        """Forget records of later steps, as when the run goes back to a checkpoint.

        Ranks:
            Local.
        """
        if self._file is None:
            return
        self._file.close()
        keep_records(self.path, steps_done)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed by `close`

    def close(self) -> None:
        """Close the file and the trackers."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        for tracker in self._trackers:
            tracker.close()

    def _open(self, steps_done: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.config.tensorboard:
            self._trackers.append(TensorBoard(self.path.parent / "tensorboard", steps_done))
        if self.config.wandb is not None:
            self._trackers.append(WeightsAndBiases(self.config.wandb, self.path.parent))
        keep_records(self.path, steps_done)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed by `close`


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file; a last line that a killed run left unfinished is passed over."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def keep_records(path: Path, steps_done: int) -> None:
    """Drop records of steps after `steps_done`, and unfinished lines; the file is replaced as a whole."""
    if not path.exists():
        return
    kept = [record for record in read_records(path) if record["step"] <= steps_done]
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(partial, path)


def _encoded(value: Value) -> Value:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
