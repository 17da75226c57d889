"""Save a training run, find its checkpoints, and resume from one."""

from __future__ import annotations

import json
import re
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from shardwise.checkpointing.formats.detect import open_checkpoint
from shardwise.checkpointing.formats.sharded import is_committed
from shardwise.checkpointing.full_file import save_full
from shardwise.checkpointing.manager import Checkpointer, Retention
from shardwise.checkpointing.state.names import with_our_names
from shardwise.checkpointing.state.slices import model_tensors
from shardwise.config.run import CheckpointConfig
from shardwise.distributed.agreement import on_rank_zero
from shardwise.errors import CheckpointError, ConfigError, raise_listed
from shardwise.training.ema import EMA

Kind = Literal["sharded", "full", "dcp"]

_NAME = re.compile(r"step-(\d{8,})(\.pt)?")
_METADATA = ".metadata"


TrainState = dict[str, Any]
"""Everything of a run that a checkpoint holds: `model`, `optimizers`, and further objects with `state_dict`."""


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


def _load_dcp(path: Path, model: nn.Module, optimizers: Optimizer, **objects: Any) -> None:
    """Load a folder that `torch.distributed.checkpoint` wrote for a run of shardwise before 0.3. Collective."""
    weights, optim = get_state_dict(model, optimizers)
    averages = {name: item for name, item in objects.items() if isinstance(item, EMA)}
    tensors = {name: {"shadow": item.state_dict()["shadow"]} for name, item in averages.items()}
    stored: dict[str, Any] = {"model": weights, "optim": optim, "tensors": tensors, "plain": ""}
    try:
        dcp.load(stored, checkpoint_id=str(path))
    except dcp.api.CheckpointException as error:  # no `Exception`
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
    """A run's checkpoints: saved in the configured format, loaded in any.

    Args:
        folder: The run's.
        config: Format and retention.
        stack: Waits for the last save at its end.
        trainable_only: Leave frozen parameters out of sharded checkpoints.

    Ranks:
        Collective throughout.
    """

    def __init__(
        self, folder: Path, config: CheckpointConfig, stack: ExitStack, *, trainable_only: bool = False
    ) -> None:
        self.folder, self.config = folder / CHECKPOINTS, config
        self.latest: Path | None = None
        """The last checkpoint saved or loaded."""
        self.wait_s = 0.0
        """Seconds that training waited for saves since `take_wait_s`."""
        keep = {name: getattr(config, name) for name in ("keep_last", "keep_every", "keep_best")}
        self._retention = Retention(**keep)  # of full files
        checkpointer = Checkpointer(
            self.folder, asynchronous=config.asynchronous, trainable_only=trainable_only, **keep
        )
        self._checkpointer = stack.enter_context(checkpointer)
        self._saved_step = -1

    def newest(self) -> CheckpointRef | None:
        """The newest checkpoint of this run."""
        self.wait()
        return on_rank_zero(lambda: next(iter(find_checkpoints(self.folder)[::-1]), None))

    def load(self, found: CheckpointRef, state: TrainState) -> None:
        """Load a checkpoint into the run.

        Raises:
            CheckpointError: It is of another model or run, or damaged; the same on every rank.
        """
        if found.kind == "dcp":
            _load_dcp(found.path, **state)
        else:
            self._checkpointer.load(path=found.path, **state)
        self.latest = found.path
        is_own = found.path.parent == self.folder
        self._saved_step = found.step if is_own else -1
        if is_own:
            self._retention.adopt(self._present())

    def save(self, step: int, state: TrainState, metric: float | None = None) -> None:
        """Save the run after `step` steps, unless that checkpoint exists."""
        if step == self._saved_step:
            return
        start = time.perf_counter()
        if self.config.format == "full":
            self.latest = self.folder / f"step-{step:08d}.pt"
            save_full(self.latest, overwrite=True, **state)
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
        """Wait for the save in the background."""
        start = time.perf_counter()
        self._checkpointer.wait()
        self.wait_s += time.perf_counter() - start

    def _present(self) -> dict[int, Path]:
        return {found.step: found.path for found in find_checkpoints(self.folder)}


def find_resumed(checkpoints: Path, resume: str) -> CheckpointRef | None:
    """The checkpoint that a run resumes from.

    Args:
        checkpoints: Folder of the run's own checkpoints.
        resume: `auto`, `never`, or the path of a checkpoint, of a folder of them, or of a run.

    Raises:
        ConfigError: `resume` is `never`, and the folder has a checkpoint already.
        CheckpointError: There is none at that path.
    """
    own = find_checkpoints(checkpoints)
    if resume == "auto":
        return own[-1] if own else None
    if resume == "never":
        if own:
            raise ConfigError(
                f"checkpoint.resume is never, but the folder has a checkpoint of step {own[-1].step}",
                where=f"checkpoint.resume, folder ({own[-1].path})",
                why="a run never writes over another's checkpoints",
                fix="set folder to a new one, or checkpoint.resume = auto to go on from there",
            )
        return None
    if own:  # a restart resumes from the run's own progress
        return own[-1]
    return _at(Path(resume))


def refuse_other_weights(found: CheckpointRef, model: nn.Module) -> None:
    """Raise a CheckpointError if a checkpoint is not of this model, by its index, before anything is built."""
    contents = with_our_names(open_checkpoint(found.path))
    stored = {name.removeprefix(_MODEL): t.shape for name, t in contents.tensors.items() if name.startswith(_MODEL)}
    problems = []
    for tensor in model_tensors(model):
        shapes = [stored.pop(name) for name in tensor.names if name in stored]
        if not shapes and not (tensor.is_frozen and contents.details.get("trainable_only")):
            problems.append(f"{tensor.name}: not in the checkpoint")
        elif shapes and tuple(shapes[0]) != tensor.shape:
            problems.append(f"{tensor.name}: {list(shapes[0])} in the checkpoint, {list(tensor.shape)} in the model")
    problems += [f"{name}: not in the model" for name in stored]
    raise_listed(
        problems,
        "the checkpoint is of another model: {num} tensors differ",
        why=f"a run goes on with the weights and the optimizer that it had: {found.path}",
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
            why="a run goes on from a whole checkpoint; half-written ones are left out",
            fix="name a run's folder or one of its checkpoints, or set checkpoint.resume = auto",
        )
    return CheckpointRef(0, path, kind)
