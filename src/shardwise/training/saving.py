"""Three ways to keep a run: our sharded checkpoints, one file of whole tensors, torch's Distributed Checkpoint."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from shardwise.checkpointing.full_file import load_full, save_full
from shardwise.checkpointing.manager import Checkpointer
from shardwise.checkpointing.saving.retention import Retention, removable
from shardwise.checkpointing.sharded.committing import is_committed, remove_checkpoint
from shardwise.config.run import CheckpointConfig
from shardwise.errors import CheckpointError
from shardwise.ranks import on_rank_zero
from shardwise.training.ema import EMA

Kind = Literal["sharded", "full", "dcp"]

_NAME = re.compile(r"step-(\d{8,})(\.pt)?")
_METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class Kept:
    """Everything of a run that a checkpoint keeps."""

    model: nn.Module
    optimizer: Optimizer
    objects: dict[str, Any] = field(default_factory=dict)
    """Further ones with `state_dict`: the schedule, the data, the average where there is one."""


@dataclass(frozen=True, order=True, slots=True)
class Found:
    """A whole checkpoint in a folder."""

    step: int
    path: Path = field(compare=False)
    kind: Kind = field(compare=False)


def find_checkpoints(folder: Path) -> list[Found]:
    """The whole checkpoints of any kind that lie in `folder`, the newest last; half-written ones are left out.

    Ranks:
        Local.
    """
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match, kind = _NAME.fullmatch(path.name), kind_of(path)
        if match is not None and kind is not None:
            found.append(Found(int(match[1]), path, kind))
    return sorted(found)


def kind_of(path: Path) -> Kind | None:
    """What kind of checkpoint lies there; None: no whole one."""
    if path.is_file():
        return "full"
    if is_committed(path):
        return "sharded"
    return "dcp" if (path / _METADATA).is_file() else None


class Saver(Protocol):
    """Saves a run, and loads what it saved."""

    def save(self, step: int, kept: Kept, metric: float | None) -> None:
        """Save the run as it is after `step` steps. Collective."""
        ...

    def load(self, path: Path, kept: Kept) -> None:
        """Put a checkpoint into the run's objects. Collective."""
        ...

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        ...

    def wait(self) -> None:
        """Return when nothing is being written any more."""
        ...

    def close(self) -> None:
        """Wait, and give back what saving needed."""
        ...


def open_saver(kind: Kind, folder: Path, config: CheckpointConfig) -> Saver:
    """What saves and loads checkpoints of a kind in `folder`.

    Ranks:
        Collective.
    """
    if kind == "sharded":
        return ShardedSaver(folder, config)
    return FullSaver(folder, config) if kind == "full" else DcpSaver(folder, config)


class ShardedSaver:
    """`Checkpointer`: each rank its part, in the background, on any number of ranks later."""

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        keep = {"keep_last": config.keep_last, "keep_every": config.keep_every, "keep_best": config.keep_best}
        self._checkpointer = Checkpointer(folder, asynchronous=config.asynchronous, **keep)

    def save(self, step: int, kept: Kept, metric: float | None) -> None:
        """Start saving; the next optimizer step waits until the state is copied."""
        self._checkpointer.save(step, model=kept.model, optimizers=kept.optimizer, metric=metric, **kept.objects)

    def load(self, path: Path, kept: Kept) -> None:
        """Each rank reads its part."""
        self._checkpointer.load(path=path, model=kept.model, optimizers=kept.optimizer, **kept.objects)

    def path(self, step: int) -> Path:
        """A folder."""
        return Path(str(self._checkpointer.path(step)))

    def wait(self) -> None:
        """Until the save is committed."""
        self._checkpointer.wait()

    def close(self) -> None:
        """End the writing process."""
        self._checkpointer.close()


class _Plain:
    """What the two plain kinds share: they write before they return, and remove old ones themselves."""

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        self.folder = folder
        self._retention = Retention(
            keep_last=config.keep_last, keep_every=config.keep_every, keep_best=config.keep_best
        )
        self._metrics: dict[int, float] = {}

    def wait(self) -> None:
        """Nothing is written in the background."""

    def close(self) -> None:
        """Nothing is held."""

    def _retire(self, newest: int, metric: float | None) -> None:
        """Remove what need not be kept, on rank 0."""
        if metric is not None:
            self._metrics[newest] = metric
        present = {found.step: found.path for found in find_checkpoints(self.folder)}
        self._metrics = {step: value for step, value in self._metrics.items() if step in present}
        for step in removable(present, newest, self._retention, self._metrics):
            path = present[step]
            if path.is_dir():
                remove_checkpoint(path)
            else:
                path.unlink(missing_ok=True)


class FullSaver(_Plain):
    """`save_full`: one `torch.save` file of whole tensors, gathered and written by rank 0."""

    def save(self, step: int, kept: Kept, metric: float | None) -> None:
        """Gather, and write while gathering."""
        on_rank_zero(lambda: self.folder.mkdir(parents=True, exist_ok=True))
        save_full(self.path(step), model=kept.model, optimizers=kept.optimizer, overwrite=True, **kept.objects)
        on_rank_zero(lambda: self._retire(step, metric))

    def load(self, path: Path, kept: Kept) -> None:
        """Each rank reads its part of the file."""
        load_full(path, model=kept.model, optimizers=kept.optimizer, **kept.objects)

    def path(self, step: int) -> Path:
        """A file."""
        return self.folder / f"step-{step:08d}.pt"


class DcpSaver(_Plain):
    """Plain `torch.distributed.checkpoint`: `get_state_dict`, `save`, `load`, `set_state_dict`."""

    def save(self, step: int, kept: Kept, metric: float | None) -> None:
        """Each rank writes its part; the folder gets its name when all have."""
        partial = self.path(step).with_name(self.path(step).name + ".partial")
        _communicating(lambda: dcp.save(_state(kept), checkpoint_id=str(partial)), partial)

        def commit() -> None:
            if self.path(step).exists():
                remove_checkpoint(self.path(step))
            partial.rename(self.path(step))
            self._retire(step, metric)

        on_rank_zero(commit)

    def load(self, path: Path, kept: Kept) -> None:
        """Each rank reads its part into the state it has."""
        state = _state(kept)
        _communicating(lambda: dcp.load(state, checkpoint_id=str(path)), path)
        set_state_dict(kept.model, kept.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        plain = json.loads(state["plain"])
        for name, item in kept.objects.items():
            item.load_state_dict({**plain[name], **state["tensors"].get(name, {})})

    def path(self, step: int) -> Path:
        """A folder."""
        return self.folder / f"step-{step:08d}"


def _state(kept: Kept) -> dict[str, Any]:
    """What DCP saves, or loads into: tensors as they are, plain values as one text, whose types DCP would change."""
    model, optim = get_state_dict(kept.model, kept.optimizer)
    plain: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for name, item in kept.objects.items():
        plain[name] = dict(item.state_dict())
        if isinstance(item, EMA):
            tensors[name] = {"shadow": plain[name].pop("shadow")}
    return {"model": model, "optim": optim, "tensors": tensors, "plain": json.dumps(plain)}


def _communicating(work: Any, path: Path) -> None:
    """Run a call of DCP, whose errors are no `Exception`."""
    try:
        work()
    except dcp.api.CheckpointException as error:
        raise CheckpointError(
            f"torch.distributed.checkpoint failed on ranks {sorted(error.failures)}",
            where=str(path),
            why=str(next(iter(error.failures.values()), error))[:2000],
            fix="check the folder, and that the checkpoint is of this model; older ones were kept",
        ) from None
