"""A run's folder, and the outcome of the run."""

from __future__ import annotations

import itertools
import os
import re
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from shardwise.checkpointing.storage.files import is_remote
from shardwise.config.load import to_yaml
from shardwise.config.run import RunConfig
from shardwise.distributed.launchers import read_launch
from shardwise.errors import ConfigError
from shardwise.training.metrics import read_records
from shardwise.units import format_count, format_seconds

CONFIG_NAME = "config.yaml"
_PARENT = "runs"


def with_folder(config: RunConfig, *, reserve: bool = True) -> RunConfig:
    """The config with its folder: the given one, one named after the launcher's job, or the next free name in `runs`.

    Args:
        config: The run.
        reserve: Create the folder, so that no other run gets the name.

    Raises:
        ConfigError: It cannot be created, or is a URL.

    Ranks:
        Local: call it once, before the ranks start, so that a restart finds its checkpoints.
    """
    if config.folder is not None:
        if is_remote(config.folder):
            raise ConfigError(
                f"{config.folder} is a URL",
                where="folder",
                why="metrics, settings and checkpoints of a run go to a local or mounted folder",
                fix="set folder to a path, and copy its checkpoints; or train with Checkpointer, which writes to URLs",
            )
        return config
    name = _plain_name(Path(config.model).name) or "run"
    if job := _plain_name(read_launch().job):  # the same after a restart of the job
        return replace(config, folder=str(Path(_PARENT, f"{name}-{job}")))
    for number in itertools.count(1):
        folder = Path(_PARENT, f"{name}-{number}")
        try:
            if reserve:
                folder.mkdir(parents=True)  # another run may be faster
            if reserve or not folder.exists():
                return replace(config, folder=str(folder))
        except FileExistsError:
            continue
        except OSError as error:
            raise _unwritable(folder, error) from None
    raise AssertionError("there is always another number")


def remove_if_empty(config: RunConfig) -> None:
    """Remove the run's folder if nothing was ever written into it."""
    try:
        os.rmdir(config.folder or "")
    except OSError:
        return  # there is something in it, or it was never made


def prepare_folder(folder: Path) -> None:
    """Make the folder; raise a ConfigError if files cannot be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        raise _unwritable(folder, error) from None


def refuse_other_model(folder: Path, config: RunConfig) -> None:
    """Raise a ConfigError if the folder's `config.yaml` names another model, other options of it or other adapters."""
    try:
        theirs = _model_settings(yaml.safe_load((folder / CONFIG_NAME).read_text()))
    except (OSError, yaml.YAMLError, TypeError, KeyError, AttributeError):
        return  # no run yet, or not our file; tensors are compared anyway
    ours = _model_settings(yaml.safe_load(to_yaml(config)))
    if theirs != ours:
        before, now = (
            settings["model"]
            + "".join(f" with {settings[name]}" for name in ("model_options", "lora") if settings[name])
            for settings in (theirs, ours)
        )
        raise ConfigError(
            f"the folder holds a run of {before}, and this one trains {now}",
            where=f"folder ({folder})",
            why="a run goes on from its own checkpoints",
            fix="set folder to a new one, or model as it was; weights may name its checkpoint to start from",
        )


def _model_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """What the weights of a run mean: a change would load them into another function."""
    lora = {name: value for name, value in (settings.get("lora") or {}).items() if name != "dropout"}
    return {"model": settings["model"], "model_options": settings.get("model_options") or {}, "lora": lora}


def write_config(folder: Path, config: RunConfig) -> None:
    """Save the settings of the run; `shardwise train` on that file resumes it."""
    text = f"# Go on with this run: shardwise train {folder / CONFIG_NAME}\n{to_yaml(config)}"
    temporary = folder / f".{CONFIG_NAME}.writing"
    temporary.write_text(text)
    temporary.replace(folder / CONFIG_NAME)


def _plain_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip("-.")


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write into {folder}: {(error.strerror or str(error)).lower()}",
        where=f"folder ({folder})",
        why="checkpoints, metrics and a copy of the settings go there",
        fix="set folder to one that can be written, with space left",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The outcome of a run; the same on every rank, except for times."""

    model: str
    num_params: int
    """Parameters of the whole model, tied ones once."""
    num_ranks: int
    steps: int
    """Steps done, including those before a resume."""
    total_steps: int
    """Steps of the whole run."""
    resumed_step: int = 0
    """Step at which this process resumed the run."""
    first_loss: float | None = None
    """Mean loss per token over all ranks, in the first step of this process."""
    last_loss: float | None = None
    evaluation_loss: float | None = None
    """Loss on the held-out data at the end; None without such data."""
    bad_steps: int = 0
    """Steps skipped because a loss or gradient was not finite."""
    tokens: int = 0
    """Tokens trained on by this process's steps, over all ranks."""
    seconds: float = 0.0
    """Time of these steps, without startup and evaluations."""
    folder: str
    """Folder of checkpoints, metrics and settings."""
    metrics: str
    """File with one line of JSON per step."""
    checkpoint: str | None = None
    """The last checkpoint."""
    sample: str | None = None
    """Prompt and generated continuation."""
    exported: str | None = None
    """Folder of the exported weights."""
    stopped: str | None = None
    """Why the run ended early, as in SIGTERM; None: it is complete."""

    @property
    def resume_command(self) -> str:
        """The command that resumes this run; with twice the steps if it is complete."""
        command = f"shardwise train {Path(self.folder) / CONFIG_NAME}"
        return command if self.steps < self.total_steps else f"{command} --set training.steps={2 * self.total_steps}"

    def read_losses(self) -> dict[int, float]:
        """The loss of every recorded step, from the metrics file, which rank 0 has written."""
        records = read_records(Path(self.metrics))
        return {record["step"]: float(record["loss"]) for record in records if "loss" in record}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {**asdict(self), "resume_command": self.resume_command}

    def __str__(self) -> str:
        lines = [self._summary()]
        if self.evaluation_loss is not None:
            lines.append(f"evaluation loss {self.evaluation_loss:.3f}")
        if self.bad_steps:
            lines.append(f"left out {self.bad_steps} steps whose loss or gradient was not finite")
        if self.sample is not None:
            lines += ["", "sample", *(f"    {line}" for line in self.sample.splitlines()), ""]
        if self.checkpoint is not None:
            lines.append(f"checkpoint  {self.checkpoint}")
        if self.exported is not None:
            lines.append(f"weights     {self.exported}")
        lines.append(f"metrics     {self.metrics}")
        lines.append(f"{'go on' if self.stopped else 'train on':<12}{self.resume_command}")
        return "\n".join(lines)

    def _summary(self) -> str:
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"
        start = f"{'stopped (' + self.stopped + ')' if self.stopped else 'trained'} {self.model}"
        start += f" ({format_count(self.num_params)} parameters) on {ranks}: "
        if self.first_loss is None or self.last_loss is None:
            return f"{start}{self.steps} steps were done already"
        made = self.steps - self.resumed_step
        since = f" from step {self.resumed_step}" if self.resumed_step else ""
        return (
            f"{start}loss {self.first_loss:.3f} -> {self.last_loss:.3f} in {made} steps{since}, "
            f"{format_seconds(self.seconds)}, {format_count(self.tokens / max(self.seconds, 1e-9))} tokens/s"
        )
