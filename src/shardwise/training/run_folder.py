"""A run's folder: settings, checkpoints, the checkpoint to resume from, and the outcome of the run."""

from __future__ import annotations

import itertools
import json
import os
import re
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed.checkpoint as dcp
import yaml
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from shardwise.checkpointing.formats.detect import open_checkpoint
from shardwise.checkpointing.formats.sharded import is_committed
from shardwise.checkpointing.manager import Checkpointer, Retention
from shardwise.checkpointing.names import match, model_tensors, with_our_names
from shardwise.checkpointing.storage import is_same_place, place
from shardwise.checkpointing.weights import save_full
from shardwise.config.load import to_yaml
from shardwise.config.run import CheckpointConfig, RunConfig
from shardwise.distributed.agreement import on_rank_zero
from shardwise.distributed.launchers import read_launch
from shardwise.errors import CheckpointError, ConfigError, raise_listed
from shardwise.training.ema import EMA
from shardwise.training.metrics import read_records
from shardwise.units import format_count, format_seconds

CONFIG_NAME = "config.yaml"
_PARENT = "runs"


def with_folder(config: RunConfig, *, reserve: bool = True) -> RunConfig:
    """Return the config with its folder: the given one, one named after the launcher's job, or the next free in `runs`.

    Call it once, before the ranks start, so that a restart finds its checkpoints.
    """
    if config.folder is not None:
        if isinstance(folder := place(config.folder), str):
            raise ConfigError(
                f"{config.folder} is a URL",
                where="folder",
                why="metrics, settings and checkpoints of a run go to a local or mounted folder",
                fix="set folder to a path, and copy its checkpoints; or train with Checkpointer, which writes to URLs",
            )
        return replace(config, folder=str(folder))
    name = _plain_name(Path(config.model).name) or "run"
    if job := _plain_name(read_launch().job):  # the same after a restart of the job
        return replace(config, folder=str(Path(_PARENT, f"{name}-{job}")))
    for number in itertools.count(1):
        folder = Path(_PARENT, f"{name}-{number}")
        try:
            if reserve:
                folder.mkdir(parents=True)  # fails if another run made it meanwhile
            if reserve or not folder.exists():
                return replace(config, folder=str(folder))
        except FileExistsError:
            continue
        except OSError as error:
            raise _unwritable(folder, error) from None
    raise AssertionError("there is always another number")


def remove_if_empty(config: RunConfig) -> None:
    """Remove the run's folder if nothing was ever written into it."""
    with suppress(OSError):  # not empty, or never created
        os.rmdir(config.folder or "")


def prepare_folder(folder: Path) -> None:
    """Make the folder; raise a ConfigError if files cannot be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        raise _unwritable(folder, error) from None


def refuse_other_model(folder: Path, config: RunConfig) -> None:
    """Raise a ConfigError if the folder's `config.yaml` has another model, other model options or other adapters."""
    try:
        theirs = _model_settings(yaml.safe_load((folder / CONFIG_NAME).read_text()))
    except (OSError, yaml.YAMLError, TypeError, KeyError, AttributeError):
        return  # no run yet, or not our file; loading compares the tensors
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
            why="a run resumes from its own checkpoints",
            fix="set folder to a new one, or restore model; set weights to its checkpoint to start from it",
        )


def _model_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that the weights depend on."""
    lora = {name: value for name, value in (settings.get("lora") or {}).items() if name != "dropout"}
    return {"model": settings["model"], "model_options": settings.get("model_options") or {}, "lora": lora}


def write_config(folder: Path, config: RunConfig) -> None:
    """Save the settings of the run; `shardwise train` on that file resumes it."""
    text = f"# Resume this run: shardwise train {folder / CONFIG_NAME}\n{to_yaml(config)}"
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
        fix="set folder to a writable folder with free space",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The outcome of a run; the same on every rank, except for times."""

    model: str
    num_params: int
    """Number of parameters of the unsharded model; tied ones count once."""
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
    """Duration of these steps, without startup and evaluations."""
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
    """Reason for an early end, as in SIGTERM; None: complete."""

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
        lines.append(f"{'resume' if self.stopped else 'train on':<12}{self.resume_command}")
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


Kind = Literal["sharded", "full", "dcp"]

_NAME = re.compile(r"step-(\d{8,})(\.pt)?")
_METADATA, _METRIC = ".metadata", "metric"


TrainState = dict[str, Any]
"""The contents of a run's checkpoint: `model`, `optimizers`, and other objects with a `state_dict`."""


@dataclass(frozen=True, order=True, slots=True)
class CheckpointRef:
    """A committed checkpoint."""

    step: int
    path: Path = field(compare=False)
    kind: Kind = field(compare=False)


def find_checkpoints(folder: Path) -> list[CheckpointRef]:
    """The committed checkpoints of any kind in `folder`, newest last."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match, kind = _NAME.fullmatch(path.name), kind_of(path)
        if match is not None and kind is not None:
            found.append(CheckpointRef(int(match[1]), path, kind))
    return sorted(found)


def kind_of(path: Path) -> Kind | None:
    """The kind of checkpoint at `path`; None: no committed one."""
    if path.is_file():
        return "full"
    if is_committed(path):
        return "sharded"
    return "dcp" if (path / _METADATA).is_file() else None


def _metric_of_file(path: Path | str) -> float | None:
    return open_checkpoint(path).values.get(f"extra.{_METRIC}")


def _load_dcp(path: Path, model: nn.Module, optimizers: Optimizer, **objects: Any) -> None:
    """Load a folder that `torch.distributed.checkpoint` wrote for a run of shardwise before 0.3. Collective."""
    weights, optim = get_state_dict(model, optimizers)
    averages = {name: item for name, item in objects.items() if isinstance(item, EMA)}
    tensors = {name: {"shadow": item.state_dict()["shadow"]} for name, item in averages.items()}
    stored: dict[str, Any] = {"model": weights, "optim": optim, "tensors": tensors, "plain": ""}
    try:
        dcp.load(stored, checkpoint_id=str(path))
    except dcp.api.CheckpointException as error:  # a BaseException
        raise CheckpointError(
            f"torch.distributed.checkpoint failed on ranks {sorted(error.failures)}",
            where=str(path),
            why=str(next(iter(error.failures.values()), error))[:2000],
            fix="check the folder, and that the checkpoint is of this model; older ones were kept",
        ) from None
    set_state_dict(model, optimizers, model_state_dict=stored["model"], optim_state_dict=stored["optim"])
    plain = json.loads(stored["plain"])
    for name, item in objects.items():
        item.load_state_dict({**plain[name], **stored["tensors"].get(name, {})})


CHECKPOINTS = "checkpoints"
"""Subfolder of a run's folder."""
_MODEL = "model."


class Checkpoints:
    """A run's checkpoints: saved in the configured format, loaded from any; all methods are collective."""

    def __init__(
        self, folder: Path, config: CheckpointConfig, stack: ExitStack, *, trainable_only: bool = False
    ) -> None:
        self.folder, self.config = folder / CHECKPOINTS, config
        self.latest: Path | None = None
        """The last checkpoint saved or loaded."""
        self.wait_s = 0.0
        """Seconds that training waited for saves since `take_wait_s`."""
        keep = {name: getattr(config, name) for name in ("keep_last", "keep_every", "keep_best")}
        self._retention = Retention(**keep, metric_of=_metric_of_file)
        checkpointer = Checkpointer(
            self.folder, asynchronous=config.asynchronous, trainable_only=trainable_only, **keep
        )
        self._checkpointer = stack.enter_context(checkpointer)
        self._saved_step = -1

    def newest(self) -> CheckpointRef | None:
        """The newest checkpoint of this run.

        Ranks:
            Collective.
        """
        self.wait()
        return on_rank_zero(lambda: next(iter(find_checkpoints(self.folder)[::-1]), None))

    def load(self, found: CheckpointRef, state: TrainState) -> None:
        """Load a checkpoint into the run.

        Raises:
            CheckpointError: The checkpoint is of another model or run, or damaged; the same error on every rank.
        """
        if found.kind == "dcp":
            _load_dcp(found.path, **state)
        else:
            self._checkpointer.load(path=found.path, **state)
        self.latest = found.path
        is_own = is_same_place(found.path.parent, self.folder)
        self._saved_step = found.step if is_own else -1
        if is_own:
            self._retention.adopt(self._present())

    def save(self, step: int, state: TrainState, metric: float | None = None) -> None:
        """Save the run after `step` steps, unless that checkpoint exists.

        Ranks:
            Collective.
        """
        if step == self._saved_step:
            return
        start = time.perf_counter()
        if self.config.format == "full":
            self.latest = self.folder / f"step-{step:08d}.pt"
            save_full(self.latest, overwrite=True, extra=None if metric is None else {_METRIC: metric}, **state)
            self._retention.add(step, metric)
            on_rank_zero(lambda: self._retention.retire(self._present(), step))
        else:  # `sharded` and `dcp`: DCP reads these folders
            self.latest = Path(str(self._checkpointer.path(step)))
            self._checkpointer.save(step, metric=metric, **state)
        self._saved_step = step
        self.wait_s += time.perf_counter() - start

    def take_wait_s(self) -> float:
        """Seconds that training waited since the last call."""
        waited, self.wait_s = self.wait_s, 0.0
        return waited

    def wait(self) -> None:
        """Wait for the background save."""
        start = time.perf_counter()
        self._checkpointer.wait()
        self.wait_s += time.perf_counter() - start

    def _present(self) -> dict[int, Path]:
        return {found.step: found.path for found in find_checkpoints(self.folder)}


def find_resumed(checkpoints: Path, resume: str) -> CheckpointRef | None:
    """Find the checkpoint to resume from; `resume` is `auto`, `never`, or the path of a checkpoint, run or folder."""
    own = find_checkpoints(checkpoints)
    if resume == "auto":
        return own[-1] if own else None
    if resume == "never":
        if own:
            raise ConfigError(
                f"checkpoint.resume is never, but the folder has a checkpoint of step {own[-1].step}",
                where=f"checkpoint.resume, folder ({own[-1].path})",
                why="a run never overwrites checkpoints of another run",
                fix="set folder to a new one, or checkpoint.resume = auto to resume",
            )
        return None
    older = [found.step for found in own[:-1] if is_same_place(found.path, place(resume))]
    if older:
        raise ConfigError(
            f"checkpoint.resume is step {older[0]} of this run, which has continued to step {own[-1].step}",
            where="checkpoint.resume, folder",
            why="a run never overwrites checkpoints, and later ones exist",
            fix="set folder to a new one to branch off there, or checkpoint.resume = auto",
        )
    if own:  # a restart resumes from the run's own progress
        return own[-1]
    return _at(Path(place(resume)))


def refuse_other_weights(found: CheckpointRef, model: nn.Module) -> None:
    """Raise a CheckpointError if the index of a checkpoint does not match the model, before the model is built."""
    contents = with_our_names(open_checkpoint(found.path))
    stored = {name.removeprefix(_MODEL): each for name, each in contents.tensors.items() if name.startswith(_MODEL)}
    is_partial = contents.details.get("trainable_only")
    own = [each for each in model_tensors(model) if not (is_partial and each.is_frozen) or each.name in stored]
    report = match(model, replace(contents, tensors=stored), own).report
    problems = [f"{name}: not in the checkpoint" for name in report.missing]
    problems += [*map(str, report.mismatched), *(f"{name}: not in the model" for name in report.unexpected)]
    raise_listed(
        problems,
        "the checkpoint is of another model: {num} tensors differ",
        why=f"a run resumes its weights and optimizer: {found.path}",
        fix="set model and model_options as they were (config.yaml in the run's folder has them), or set folder to "
        "a new one and checkpoint.resume = auto",
        kind=CheckpointError,
    )


def _at(path: Path) -> CheckpointRef:
    for folder in (path / CHECKPOINTS, path):
        if found := find_checkpoints(folder):
            return found[-1]
    kind = kind_of(path)
    if kind is None:
        raise CheckpointError(
            f"there is no checkpoint at {path}" + ("" if path.exists() else ": it does not exist"),
            where="checkpoint.resume",
            why="a run resumes from a complete checkpoint; incomplete ones are ignored",
            fix="set it to a run's folder or one of its checkpoints, or checkpoint.resume = auto",
        )
    return CheckpointRef(0, path, kind)
