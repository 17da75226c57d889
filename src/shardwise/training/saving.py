"""Save a training run, find its checkpoints, and resume from one."""

from __future__ import annotations

import json
import re
import time
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
from shardwise.checkpointing.manager import Checkpointer, Retainer, Retention
from shardwise.checkpointing.state.names import with_our_names
from shardwise.checkpointing.state.slices import model_tensors
from shardwise.config.run import CheckpointConfig
from shardwise.distributed.agreement import on_rank_zero
from shardwise.errors import CheckpointError, ConfigError, raise_listed
from shardwise.training.ema import EMA

Kind = Literal["sharded", "full", "dcp"]

_NAME = re.compile(r"step-(\d{8,})(\.pt)?")
_METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class TrainState:
    """Everything of a run that a checkpoint holds."""

    model: nn.Module
    optimizer: Optimizer
    objects: dict[str, Any] = field(default_factory=dict)
    """Further ones with `state_dict`: the schedule, the data, the average where there is one."""


@dataclass(frozen=True, order=True, slots=True)
class CheckpointRef:
    """A whole checkpoint in a folder."""

    step: int
    path: Path = field(compare=False)
    kind: Kind = field(compare=False)


def find_checkpoints(folder: Path) -> list[CheckpointRef]:
    """The whole checkpoints of any kind that lie in `folder`, the newest last; half-written ones are left out."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match, kind = _NAME.fullmatch(path.name), kind_of(path)
        if match is not None and kind is not None:
            found.append(CheckpointRef(int(match[1]), path, kind))
    return sorted(found)


def kind_of(path: Path) -> Kind | None:
    """What kind of checkpoint lies there; None: no whole one."""
    if path.is_file():
        return "full"
    if is_committed(path):
        return "sharded"
    return "dcp" if (path / _METADATA).is_file() else None


def _load_dcp(path: Path, state: TrainState) -> None:
    """Load a folder that `torch.distributed.checkpoint` wrote for a run of shardwise before 0.3.

    Ranks:
        Collective.
    """
    model, optim = get_state_dict(state.model, state.optimizer)
    averages = {name: item for name, item in state.objects.items() if isinstance(item, EMA)}
    tensors = {name: {"shadow": item.state_dict()["shadow"]} for name, item in averages.items()}
    stored: dict[str, Any] = {"model": model, "optim": optim, "tensors": tensors, "plain": ""}
    try:
        dcp.load(stored, checkpoint_id=str(path))
    except dcp.api.CheckpointException as error:  # no `Exception`
        raise CheckpointError(
            f"torch.distributed.checkpoint failed on ranks {sorted(error.failures)}",
            where=str(path),
            why=str(next(iter(error.failures.values()), error))[:2000],
            fix="check the folder, and that the checkpoint is of this model; older ones were kept",
        ) from None
    set_state_dict(state.model, state.optimizer, model_state_dict=stored["model"], optim_state_dict=stored["optim"])
    plain = json.loads(stored["plain"])
    for name, item in state.objects.items():
        item.load_state_dict({**plain[name], **stored["tensors"].get(name, {})})


CHECKPOINTS = "checkpoints"
"""The folder in a run's folder in which they lie."""
_MODEL = "model."


class Checkpoints:
    """A run's checkpoints: saved in the format that is asked for, loaded in the one they have.

    Args:
        folder: The run's.
        config: What is state.

    Ranks:
        Collective throughout.
    """

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        self.folder, self.config = folder / CHECKPOINTS, config
        self.latest: Path | None = None
        """The last one that this run has saved or loaded."""
        self.wait_s = 0.0
        """Seconds that training was held up by saving since they were last taken."""
        keep = {name: getattr(config, name) for name in ("keep_last", "keep_every", "keep_best")}
        self._retainer = Retainer(Retention(**keep))  # of full files
        self._checkpointer = Checkpointer(self.folder, asynchronous=config.asynchronous, **keep)
        self._saved_step = -1

    def newest(self) -> CheckpointRef | None:
        """The newest checkpoint of this run."""
        self.wait()
        return on_rank_zero(lambda: next(iter(find_checkpoints(self.folder)[::-1]), None))

    def load(self, found: CheckpointRef, state: TrainState) -> None:
        """Put a checkpoint into the run.

        Raises:
            CheckpointError: It is of another model or run, or damaged; the same on every rank.
        """
        if found.kind == "dcp":
            _load_dcp(found.path, state)
        else:
            self._checkpointer.load(path=found.path, model=state.model, optimizers=state.optimizer, **state.objects)
        self.latest = found.path
        is_own = found.path.parent == self.folder
        self._saved_step = found.step if is_own else -1
        if is_own:
            self._retainer.adopt(self._present())

    def save(self, step: int, state: TrainState, metric: float | None = None) -> None:
        """Save the run after `step` steps, unless that has been done."""
        if step == self._saved_step:
            return
        start = time.perf_counter()
        if self.config.format == "full":
            self.latest = self.folder / f"step-{step:08d}.pt"
            save_full(self.latest, model=state.model, optimizers=state.optimizer, overwrite=True, **state.objects)
            self._retainer.add(step, metric)
            on_rank_zero(lambda: self._retainer.retire(self._present(), step))
        else:  # `sharded` and `dcp`: DCP reads these folders
            self.latest = Path(str(self._checkpointer.path(step)))
            self._checkpointer.save(step, model=state.model, optimizers=state.optimizer, metric=metric, **state.objects)
        self._saved_step = step
        self.wait_s += time.perf_counter() - start

    def take_wait_s(self) -> float:
        """Seconds that training was held up since this was last asked."""
        waited, self.wait_s = self.wait_s, 0.0
        return waited

    def wait(self) -> None:
        """Until nothing is being written any more."""
        start = time.perf_counter()
        self._checkpointer.wait()
        self.wait_s += time.perf_counter() - start

    def _present(self) -> dict[int, Path]:
        return {found.step: found.path for found in find_checkpoints(self.folder)}

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._checkpointer.__exit__(kind, error, trace)


def find_resumed(checkpoints: Path, resume: str) -> CheckpointRef | None:
    """Which checkpoint a run starts from.

    Args:
        checkpoints: The folder of the run's own.
        resume: `auto`, `never`, or the path of a checkpoint, of a folder of them, or of a run.

    Raises:
        ConfigError: There is none at that path; or there are some here already and the run shall start afresh.
    """
    own = find_checkpoints(checkpoints)
    if resume == "auto":
        return own[-1] if own else None
    if resume == "never":
        if own:
            raise ConfigError(
                f"the run shall start afresh, but its folder holds a checkpoint of step {own[-1].step}",
                where=f"checkpoint.resume, folder ({own[-1].path})",
                why="a run never writes over another's checkpoints",
                fix="set folder to a new one, or checkpoint.resume = auto to go on from there",
            )
        return None
    if own:  # started from elsewhere, and came this far: a restart must not lose that
        return own[-1]
    return _at(Path(resume))


def refuse_other_weights(found: CheckpointRef, model: nn.Module) -> None:
    """Raise if a checkpoint is not of this model, before anything is built or changed.

    Args:
        found: The checkpoint; only its index is read.
        model: On meta, not sharded yet.

    Raises:
        CheckpointError: With the first tensors that differ.

    Ranks:
        Local: call it on rank 0.
    """
    contents = with_our_names(open_checkpoint(found.path))
    stored = {name.removeprefix(_MODEL): t.shape for name, t in contents.tensors.items() if name.startswith(_MODEL)}
    problems = []
    for tensor in model_tensors(model):
        shapes = [stored.pop(name) for name in tensor.names if name in stored]
        if not shapes:
            problems.append(f"{tensor.name}: not in the checkpoint")
        elif tuple(shapes[0]) != tensor.shape:
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
