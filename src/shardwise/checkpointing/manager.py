"""Checkpointer: numbered checkpoints of a run in one folder, saved in the background, with retention."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import logging
import math
import signal
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise.checkpointing.contents import Contents
from shardwise.checkpointing.formats import sharded
from shardwise.checkpointing.loading import load_run, open_for
from shardwise.checkpointing.reading import Verify
from shardwise.checkpointing.saving import PendingSave, Saver, describe_run
from shardwise.checkpointing.state import FlatState, RunObjects, Stateful
from shardwise.checkpointing.storage import Place, is_same_place, join, place, size_problem, split
from shardwise.distributed.agreement import Channel, run_and_gather
from shardwise.errors import CheckpointError, ConfigError, require_choice
from shardwise.progress import Progress

_log = logging.getLogger("shardwise.checkpointing")


def stored_metric(folder: Place) -> float | None:
    """Return the metric that a sharded checkpoint was saved with."""
    return sharded.read_manifest(folder).details.get("metric")


@dataclass(kw_only=True, slots=True)
class Retention:
    """Removes checkpoints of a run by its retention rules; never removes checkpoints of other runs.

    A run's checkpoints are those that it saved, and those in the folder when it resumed from one of them.
    """

    keep_last: int | None = 3
    """Number of latest checkpoints to keep; None keeps all."""
    keep_every: int | None = None
    """Keep every checkpoint whose step is a multiple of this."""
    keep_best: int | None = None
    """Number of checkpoints with the best metric to keep."""
    best: Literal["min", "max"] = "min"
    """Whether a smaller or a larger metric is better."""
    metric_of: Callable[[Place], float | None] = stored_metric
    """Returns the metric of a checkpoint that this process has not saved."""
    _metrics: dict[int, float | None] = field(default_factory=dict, init=False)  # None: saved without a metric
    _own: set[int] = field(default_factory=set, init=False)
    _has_warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        require_choice(self.best, ("min", "max"), where="Checkpointer(best=...)")
        limits = {"keep_last": self.keep_last, "keep_every": self.keep_every, "keep_best": self.keep_best}
        wrong = [f"{name} is {value}" for name, value in limits.items() if value is not None and value < 1]
        if wrong:
            raise ConfigError(
                ", ".join(wrong),
                where="Checkpointer(...)",
                why="the latest checkpoint is always kept; numbers count checkpoints or steps",
                fix="pass positive numbers, or None to disable a rule",
            )

    def add(self, step: int, metric: float | None) -> None:
        """Record a step that this run saves."""
        self._own.add(step)
        self._metrics[step] = metric

    def adopt(self, steps: Iterable[int]) -> None:
        """Record steps that belong to this run because it resumed from one of them."""
        self._own.update(steps)

    def removable(
        self, steps: Collection[int], newest: int, metrics: Mapping[int, float | None] | None = None
    ) -> list[int]:
        """Return the steps of committed checkpoints to remove, oldest first; never includes `newest`."""
        if self.keep_last is None or newest not in steps:
            return []
        kept = {newest}
        kept.update(sorted(step for step in steps if step != newest)[::-1][: self.keep_last - 1])
        if self.keep_every is not None:
            kept.update(step for step in steps if step % self.keep_every == 0)
        if self.keep_best is not None:
            numbers = {step: value for step, value in (metrics or {}).items() if value is not None and value == value}
            sign = 1 if self.best == "min" else -1
            ranked = sorted((sign * value, -step) for step, value in numbers.items() if step in steps)
            kept.update(-step for _, step in ranked[: self.keep_best])
        return sorted(set(steps) - kept)

    def retire(self, present: Mapping[int, Place], newest: int) -> None:
        """Remove checkpoints by the retention rules, on rank 0; a failure is only a warning."""
        others = sorted(present.keys() - self._own)
        if others and self.keep_last is not None and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s: this run has neither saved nor loaded the checkpoints of steps %s; they are kept. Load one of "
                "them to continue that run, or use another folder",
                present[newest],
                others,
            )
        own = [step for step in present if step in self._own]
        for step in own if self.keep_best is not None else ():
            if step not in self._metrics:
                self._metrics[step] = None
                with contextlib.suppress(CheckpointError):  # the checkpoint may be damaged or have another format
                    self._metrics[step] = self.metric_of(present[step])
        for step in self.removable(own, newest, self._metrics):
            try:
                sharded.remove_checkpoint(present[step])
            except CheckpointError as error:
                _log.warning("an old checkpoint could not be removed: %s", error)


_open: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
"""Checkpointers whose background saves are finished when the program exits or receives SIGTERM. If the program has
its own SIGTERM handler, that handler is kept, and the saves are finished at exit."""
_is_terminating = _is_flushed = False


def _swap_handler(old: Any, new: Any) -> None:
    """Replace the SIGTERM handler, unless another one was installed."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == old:
        signal.signal(signal.SIGTERM, new)


def _finish_all() -> None:
    """Finish the saves of all checkpointers when the program exits."""
    for checkpointer in list(_open):
        try:
            checkpointer.close()
        except Exception as error:  # the program is exiting: no caller can catch it
            _log.error("the last save failed: %s", error)
    if _is_terminating:
        _terminate()


def _on_sigterm(_number: int, _frame: FrameType | None) -> None:
    global _is_terminating
    # The interrupted thread may hold a lock that the save needs, so it must continue while another thread waits.
    if _is_flushed:
        _terminate()
    elif not _is_terminating:
        _is_terminating = True
        _thread.start_new_thread(_flush, ())


def _flush() -> None:
    global _is_flushed
    for checkpointer in list(_open):
        if (thread := checkpointer._thread) is not None:
            thread.join()
            if (error := checkpointer._error) is not None:
                _log.error("the last save failed: %s", error)
    _is_flushed = True
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _terminate() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)


class Checkpointer:
    """Saves and loads a run's state in a folder, one subfolder per step.

    A save fixes the state, copies it, and lets training continue; a background process writes the copy. Files are
    written to a folder with a partial name. When all ranks have written and synced their files, one rename commits the
    checkpoint. A failure at any point leaves the last committed checkpoint intact.

    Args:
        folder: Folder of the checkpoints: a local folder that all ranks share, or a URL that fsspec supports.
        keep_last: Number of latest checkpoints to keep; None keeps all. Checkpoints that this run has neither saved nor
            resumed from are never removed.
        keep_every: Also keep checkpoints whose step is a multiple of this.
        keep_best: Also keep this number of checkpoints with the best `metric`.
        best: Whether a smaller or a larger metric is better.
        asynchronous: Write in the background. If False, `save` returns after the checkpoint is committed.
        on_busy: Behavior of `save` while an earlier save is being written: wait for it, or skip the new one.
        fsync: Sync files to disk before committing. False is faster; a machine crash may then lose checkpoints.
        rng: Also save the random number generators of every rank.
        trainable_only: Do not save frozen parameters (the base of adapters, a frozen tower). Load the frozen weights
            (`load_weights`) before loading such a checkpoint.
        progress: Receives the bytes that this rank reads and writes, and the rate; for background saves, from another
            thread.

    Raises:
        ConfigError: An argument is invalid.

    Ranks:
        Collective, as is every method except `wait` and `close`, which wait for this rank's own work. Only one run at
        a time may save into a folder.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        keep_best: int | None = None,
        best: Literal["min", "max"] = "min",
        asynchronous: bool = True,
        on_busy: Literal["wait", "skip"] = "wait",
        fsync: bool = True,
        rng: bool = True,
        trainable_only: bool = False,
        progress: Progress | None = None,
    ) -> None:
        require_choice(on_busy, ("wait", "skip"), where="Checkpointer(on_busy=...)")
        self.folder: Place = place(folder)
        self.extra: Any = None
        """The `extra` of the loaded checkpoint; set by `load`."""
        self.notes: tuple[str, ...] = ()
        """Remarks of the last `load`, such as random states that the checkpoint lacks."""
        self._retention = Retention(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best, best=best)
        self._asynchronous, self._on_busy, self._rng, self._progress = asynchronous, on_busy, rng, progress
        self._trainable_only = trainable_only
        self._channel = Channel(CheckpointError)
        self._saver = Saver(self._channel, Channel(CheckpointError), fsync=fsync)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_ready = self._is_closed = False  # ready to save: see `_make_ready`
        self._continues: int | None = None  # the step of the last checkpoint loaded from this folder
        _open.add(self)
        atexit.unregister(_finish_all)
        atexit.register(_finish_all)  # runs before the handlers registered earlier, such as the process group's
        _swap_handler(signal.SIG_DFL, _on_sigterm)

    def save(
        self,
        step: int,
        *,
        model: nn.Module | Mapping[str, nn.Module],
        optimizers: Optimizer | Iterable[Optimizer] | Mapping[str, Optimizer] = (),
        extra: Mapping[str, Any] | None = None,
        metric: float | None = None,
        **objects: Stateful,
    ) -> bool:
        """Save the run as it is now.

        Writes to tensors after this call do not affect the checkpoint.

        Args:
            step: Training step; names the checkpoint.
            model: The model, or several models by name.
            optimizers: One optimizer, several, or several by name.
            extra: Plain values to save as well; `load` assigns them to `self.extra`.
            metric: Value for `keep_best`.
            **objects: Anything with `state_dict` and `load_state_dict`: schedulers, scalers, averages, data loaders.

        Returns:
            False if `on_busy` is "skip" and an earlier save is still being written; otherwise True.

        Raises:
            CheckpointError: The state cannot be saved, or the previous background save failed.

        Ranks:
            Collective.
        """
        self._check_usable()
        if self._on_busy == "skip" and self._asynchronous:
            busy = self._thread is not None and self._thread.is_alive()
            if any(run_and_gather(lambda: (None, busy), self._channel, CheckpointError)[1]):
                return False
        self.wait()
        if not self._is_ready:
            self._channel.run_on_all(lambda: self._make_ready() if self._channel.rank == 0 else None)
            self._is_ready = True

        def collect() -> tuple[RunObjects, FlatState]:
            run = RunObjects(model, optimizers, objects, trainable_only=self._trainable_only)
            found = run.collect(extra=extra, rng_rank=self._channel.rank if self._rng else None)
            found.details = describe_run(run)
            if metric is not None and math.isfinite(metric):
                found.details["metric"] = float(metric)
            return run, found

        pending = self._saver.start(self.path(step), step, collect, background=self._asynchronous)
        self._retention.add(step, metric)
        if self._asynchronous:
            thread = threading.Thread(target=self._finish, args=(pending,), name=f"checkpoint of step {step}")
            try:
                thread.start()
                self._thread = thread
            except RuntimeError:  # no more threads: the other ranks wait for this one, so write synchronously
                self._finish(pending)
        else:
            self._finish(pending)
            self.wait()
        return True

    def prepare(
        self,
        *,
        model: nn.Module | Mapping[str, nn.Module],
        optimizers: Optimizer | Iterable[Optimizer] | Mapping[str, Optimizer] = (),
        **objects: Stateful,
    ) -> None:
        """Allocate the staging memory of background saves and start the writer process before the first save.

        Otherwise the first save waits for this: pinning gigabytes of memory for a GPU takes seconds. Call it after the
        first optimizer step, when the optimizer state exists.

        Args:
            model: As in `save`.
            optimizers: As in `save`.
            **objects: As in `save`.

        Ranks:
            Collective.
        """
        self._check_usable()
        self.wait()
        if self._asynchronous:
            rank = self._channel.rank if self._rng else None
            run = RunObjects(model, optimizers, objects, trainable_only=self._trainable_only)
            self._saver.prepare(lambda: (run, run.collect(rng_rank=rank)))

    def load(
        self,
        *,
        model: nn.Module | Mapping[str, nn.Module],
        optimizers: Optimizer | Iterable[Optimizer] | Mapping[str, Optimizer] = (),
        step: int | None = None,
        path: str | Path | None = None,
        strict: bool = True,
        verify: Verify = "while",
        **objects: Stateful,
    ) -> int:
        """Load a saved state into the run's objects, on any number of ranks and any mesh.

        Each rank reads only its own shards. Saved objects that are not passed are not read.

        Args:
            model: The model, or several by name, as saved; on the meta device or with values.
            optimizers: As saved. They need no state yet.
            step: Step of the checkpoint; default: the latest. After loading an older one, the next `save` renames later
                checkpoints to `<name>.abandoned`.
            path: Load this checkpoint instead, of any format: torch's Distributed Checkpoint, FSDP1's, a single file.
            strict: Require that the stored state of each object and the object itself match exactly. Otherwise matching
                values are loaded.
            verify: `while`: verify checksums as bytes are read; if one is wrong, the models refuse to run until
                they are loaded again. `before`: read everything twice, and verify it before any object is modified.
            **objects: As saved.

        Returns:
            The step of the checkpoint; 0 if `path` does not record one.

        Raises:
            CheckpointError: The checkpoint does not exist, does not match or is damaged; the same on every rank.

        Ranks:
            Collective.
        """
        self._check_usable()
        self.wait()
        chosen = self.latest() if step is None and path is None else step

        def open_run() -> tuple[RunObjects, Contents]:
            run = RunObjects(model, optimizers, objects)
            return run, self._open(chosen) if path is None else open_for(run, path)

        run, contents = self._channel.run_on_all(open_run)
        loaded = load_run(
            run, contents, self._channel, strict=strict, verify=verify, rng=self._rng, progress=self._progress
        )
        self.extra, self.notes = loaded.extra, tuple(loaded.notes)
        given = self.folder if path is None else place(path)
        is_own = any(is_same_place(self.folder, each) for each in (given, split(given)[0]))
        self._continues, self._is_ready = contents.step if is_own else None, False
        if is_own and self._channel.rank == 0:
            self._retention.adopt(sharded.committed_steps(self.folder))
        for note in self.notes:
            _log.info(note)
        return contents.step or 0

    def latest(self) -> int | None:
        """Return the highest step of a committed checkpoint, or None.

        Ranks:
            Collective: rank 0 lists the folder, so that all ranks get the same result.
        """
        self._check_usable()
        is_first = self._channel.rank == 0
        _, steps = run_and_gather(
            lambda: (None, max(sharded.committed_steps(self.folder), default=None) if is_first else None),
            self._channel,
            CheckpointError,
        )
        return steps[0]

    def path(self, step: int) -> Place:
        """Return the path of a step's checkpoint, which need not exist.

        Ranks:
            Local.
        """
        return sharded.step_folder(self.folder, step)

    def wait(self) -> None:
        """Wait for all pending saves.

        Raises:
            CheckpointError: The background save failed. Raised once, on every rank.

        Ranks:
            Local, although the pending save needs all ranks.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for pending saves; release the writer process, the staging memory and the process group.

        Raises:
            CheckpointError: As in `wait`; raised after everything is released.

        Ranks:
            Local, as in `wait`.
        """
        if self._is_closed:
            return
        try:
            self.wait()
        finally:
            self._is_closed = True
            _open.discard(self)
            if not _open:
                _swap_handler(_on_sigterm, signal.SIG_DFL)
            self._saver.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"(also, the last save failed: {failed})")

    def _open(self, step: int | None) -> Contents:
        if step is not None and sharded.is_committed(self.path(step)):
            return sharded.read_manifest(self.path(step))
        steps = sharded.committed_steps(self.folder)
        raise CheckpointError(
            "there is no checkpoint to load" if step is None else f"there is no checkpoint of step {step}",
            where=str(self.folder),
            why=f"the committed steps are {steps}" if steps else "no save into this folder was ever committed",
            fix=f"load step {steps[-1]}, the latest" if steps else "check the folder, or start a new run",
        )

    def _finish(self, pending: PendingSave) -> None:
        try:
            self._saver.finish(pending, retire=partial(self._retire, pending.step), progress=self._progress)
        except BaseException as error:
            self._error = error

    def _retire(self, newest: int, records: Sequence[sharded.FileRecord]) -> None:
        """Check the latest checkpoint's file sizes, then remove checkpoints by the retention rules; for rank 0."""
        folder = self.path(newest)
        short = [record.file for record in records if size_problem(join(folder, record.file), record.num_bytes)]
        if short:  # older checkpoints may be the only usable ones
            raise CheckpointError(
                f"{', '.join(short)} changed after it was written",
                where=str(folder),
                why="the size of a file of the latest checkpoint changed",
                fix="find the other writer; older checkpoints were kept",
            )
        self._retention.retire({step: self.path(step) for step in sharded.committed_steps(self.folder)}, newest)

    def _make_ready(self) -> None:
        """Remove the remains of interrupted saves, and rename checkpoints after the loaded step; called on rank 0."""
        sharded.sweep(self.folder)
        moved = [] if self._continues is None else sharded.rewind(self.folder, self._continues)
        if moved:
            _log.warning(
                "the run continues from step %d; later checkpoints were renamed and are never removed: %s",
                self._continues,
                ", ".join(map(str, moved)),
            )

    def _check_usable(self) -> None:
        """Raise if the Checkpointer is closed, or if other ranks do not make this call. Collective."""
        if self._is_closed:
            raise CheckpointError("the Checkpointer is closed", where=str(self.folder), fix="create a new one")
        if self._channel.size == 1 and dist.is_initialized() and dist.get_world_size() > 1:
            raise CheckpointError(
                f"the Checkpointer was created for one rank, and there are {dist.get_world_size()}",
                where=str(self.folder),
                why="it was created before the process group, so every rank would save separately",
                fix="create it after init_distributed() or init_process_group()",
            )
        self._channel.arrive()
