"""Where a run goes on: its newest checkpoint, another's, or none; saving and loading in whatever format it has."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.checkpointing.formats.detect import open_checkpoint
from shardwise.checkpointing.state.sections import with_our_names
from shardwise.checkpointing.state.slices import model_tensors
from shardwise.config.run import CheckpointConfig
from shardwise.errors import CheckpointError, ConfigError
from shardwise.ranks import on_rank_zero
from shardwise.training.saving import Found, Kept, Saver, find_checkpoints, kind_of, open_saver

CHECKPOINTS = "checkpoints"
"""The folder in a run's folder in which they lie."""
_MODEL = "model."
_MAX_SHOWN = 8


class Checkpoints:
    """A run's checkpoints: saved in the format that is asked for, loaded in the one they have.

    Args:
        folder: The run's.
        config: What is kept.

    Ranks:
        Collective throughout.
    """

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        self.folder, self.config = folder / CHECKPOINTS, config
        self.latest: Path | None = None
        """The last one that this run has saved or loaded."""
        self.wait_s = 0.0
        """Seconds that training was held up by saving since they were last taken."""
        self._saver: Saver = open_saver(config.format, self.folder, config)
        self._saved_step = -1

    def find(self) -> Found | None:
        """The checkpoint to go on from, as `checkpoint.resume` says."""
        return on_rank_zero(lambda: find_resumed(self.folder, self.config.resume))

    def newest(self) -> Found | None:
        """The newest checkpoint of this run."""
        self.wait()
        return on_rank_zero(lambda: next(iter(find_checkpoints(self.folder)[::-1]), None))

    def load(self, found: Found, kept: Kept) -> None:
        """Put a checkpoint into the run.

        Raises:
            CheckpointError: It is of another model or run, or damaged; the same on every rank.
        """
        own = found.kind == self.config.format
        saver = self._saver if own else open_saver(found.kind, self.folder, self.config)
        try:
            saver.load(found.path, kept)
        finally:
            if not own:
                saver.close()
        self.latest = found.path
        self._saved_step = found.step if found.path.parent == self.folder else -1

    def save(self, step: int, kept: Kept, metric: float | None = None) -> None:
        """Save the run after `step` steps, unless that has been done."""
        if step == self._saved_step:
            return
        start = time.perf_counter()
        self._saver.save(step, kept, metric)
        self._saved_step, self.latest = step, self._saver.path(step)
        self.wait_s += time.perf_counter() - start

    def take_wait_s(self) -> float:
        """Seconds that training was held up since this was last asked."""
        waited, self.wait_s = self.wait_s, 0.0
        return waited

    def wait(self) -> None:
        """Until nothing is being written any more."""
        start = time.perf_counter()
        self._saver.wait()
        self.wait_s += time.perf_counter() - start

    def close(self) -> None:
        """Wait, and give back what saving needed."""
        self._saver.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            self.close()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"(also, the last save failed: {failed})")


def find_resumed(checkpoints: Path, resume: str) -> Found | None:
    """Which checkpoint a run starts from.

    Args:
        checkpoints: The folder of the run's own.
        resume: `auto`, `never`, or the path of a checkpoint, of a folder of them, or of a run.

    Raises:
        ConfigError: There is none at that path; or there are some here already and the run shall start afresh.

    Ranks:
        Local.
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


def refuse_other_weights(found: Found, model: nn.Module) -> None:
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
    if problems:
        more = [f"... and {len(problems) - _MAX_SHOWN} more"] if len(problems) > _MAX_SHOWN else []
        raise CheckpointError(
            f"the checkpoint is of another model: {len(problems)} tensors differ",
            where="\n".join([str(found.path), *problems[:_MAX_SHOWN], *more]),
            why="a run goes on with the weights and the optimizer that it had",
            fix="set model and model_options as they were (config.yaml in the run's folder has them), or set folder to "
            "a new one and checkpoint.resume = auto",
        )


def _at(path: Path) -> Found:
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
    return Found(0, path, kind)
