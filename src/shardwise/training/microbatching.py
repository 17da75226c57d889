"""Split a batch into micro-batches, and after out-of-memory use less memory on all ranks."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import compat
from shardwise.distributed.agreement import gather_objects, on_rank_zero
from shardwise.errors import TrainingError
from shardwise.models.random_state import random_state, set_random_state
from shardwise.sharding.blocks import AdaptiveActivations
from shardwise.sharding.hooks.watching import paused
from shardwise.sharding.registry import recover
from shardwise.training.data.samples import Batch

T = TypeVar("T")

_MEMORY_ERRORS = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_NUM_TRIALS = 3  # optimizer state and averages exist from the second step on
_CHEAP_TOKENS = 2**13
"""Micro-batches of this size or more are halved before activations are recomputed or offloaded: unsharding and adding
gradients takes as long as about 500 tokens, in any model."""


class Microbatches:
    """Splits a rank's batch into micro-batches, and finds the size that fits in memory.

    With several ranks the size is found in the first three steps: each step is first tried without communication, so
    that no rank waits in a collective for one that ran out of memory, and all ranks halve the size until it fits on all
    of them. A rank that runs out of memory in a later step raises; the launcher restarts all ranks with half the size.
    A single process halves the size in any step. With tensor parallelism, which communicates inside layers,
    out-of-memory is an ordinary error.

    Args:
        model: Sharded or not.
        rows: Rows of this rank's batch; the same on every rank.
        size: Rows of a micro-batch. None: start with all rows, and find the size that fits.
        record: File with the initial size after a restart.
        report: Called on rank 0 with a message when less memory is used.
        activations: The blocks' saved activations, if they adapt to memory.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: int,
        size: int | None = None,
        *,
        record: Path | None = None,
        report: Callable[[str], None] | None = None,
        activations: AdaptiveActivations | None = None,
    ) -> None:
        self._model, self._record, self._report = model, record, report or partial(print, file=sys.stderr, flush=True)
        self._activations = activations
        self._is_found = size is None and (not _is_distributed() or _is_data_parallel(model))
        """Whether the size is found automatically."""
        self._trials_left = _NUM_TRIALS if self._is_found and _is_distributed() else 0
        self._num_runs = 0
        if self._is_found and record is not None:
            size = on_rank_zero(lambda: _read(record))
        self.size = max(1, min(rows, size or rows))
        """Current number of rows of a micro-batch."""
        self.num_halvings = 0

    def split(self, batch: Batch) -> list[Batch]:
        """Split the batch into micro-batches of `size` rows; the last one may be smaller."""
        lengths = {name: len(tensor) for name, tensor in batch.items()}
        if max(lengths.values()) <= self.size:
            return [batch]
        if len(set(lengths.values())) > 1:
            raise TrainingError(
                f"the tensors of a batch have different numbers of rows: {lengths}",
                where="training.micro_batch_size",
                why=f"micro-batches of {self.size} rows are split from all of them",
                fix="pad them to one row per sample, or set training.micro_batch_size to the full batch",
            )
        split = {name: tensor.split(self.size) for name, tensor in batch.items()}
        return [dict(zip(split, parts, strict=True)) for parts in zip(*split.values(), strict=True)]

    def run(self, work: Callable[[list[Batch]], T], batch: Batch) -> T:
        """Run forward and backward over the micro-batches of a batch, halving their size until it fits.

        With several ranks the first three calls first try the step without communication. Gradients, random state and
        buffers are restored after a trial and, in one process, after a failed attempt. Collective.
        """
        self._num_runs += 1
        if self._trials_left:
            self._trials_left -= 1
            while failures := self._try(work, batch):
                self._use_less(failures, batch)
        while True:
            is_repeatable = self._is_found and not _is_distributed()
            state = volatile_state(self._model) if is_repeatable else None
            try:
                return work(self.split(batch))
            except Exception as error:
                if not self._is_found or not is_out_of_memory(error):
                    raise
                failure = str(error)
            # Outside the except block: the exception, which refers to the activations, is freed.
            if state is None:
                self._give_up(failure)
            undo(self._model, state)
            self._use_less({0: failure}, batch)

    def _try(self, work: Callable[[list[Batch]], object], batch: Batch) -> dict[int, str]:
        """Run a step without communication; return the out-of-memory errors by rank.

        Ranks:
            Collective.
        """
        state, failure = volatile_state(self._model), None
        try:
            with compat.local_collectives(), paused(self._model):
                work(self.split(batch))
        except Exception as error:  # other errors may come from the wrong weights; the step itself raises real ones
            failure = str(error) if is_out_of_memory(error) else None
        undo(self._model, state)
        return {rank: text for rank, text in enumerate(gather_objects(failure)) if text is not None}

    def _use_less(self, failures: dict[int, str], batch: Batch) -> None:
        """Halve the size while micro-batches are large; then save fewer activations; then halve it to one row."""
        length = max((tensor.shape[1] for tensor in batch.values() if tensor.ndim > 1), default=1)
        is_large = self.size > 1 and -(-self.size // 2) * length >= _CHEAP_TOKENS
        mode = None
        if self._activations is not None and not is_large:
            mode = self._activations.keep_less(recompute_blocks=self.size == 1)
        if mode is not None:
            change, setting = "blocks keep fewer activations from now on", f"shard.activations = {mode}"
        elif self.size > 1:
            before, self.size = self.size, -(-self.size // 2)
            if self._activations is not None:
                self._activations.reset()
            change = f"micro-batches of {self.size} rows from now on, not {before}"
            setting = f"training.micro_batch_size = {self.size}"
        else:
            raise _does_not_fit(*next(iter(failures.items())))
        self.num_halvings += 1
        if not _is_distributed() or dist.get_rank() == 0:
            ranks = ", ".join(map(str, failures))
            self._report(f"out of memory on rank {ranks}: {change}. Set {setting} to start with that.")

    def _give_up(self, failure: str) -> NoReturn:
        """Record half the size for the next start, and raise: the other ranks wait in collectives of this step."""
        rank, smaller = dist.get_rank(), -(-self.size // 2)
        if self.size == 1:
            raise _does_not_fit(rank, failure)
        if self._record is not None:
            self._record.write_text(f"{smaller}\n")
        raise TrainingError(
            f"rank {rank} ran out of memory in step {self._num_runs} of this process: {failure}",
            where="training.micro_batch_size",
            why=f"micro-batches of {self.size} rows fit in the first {_NUM_TRIALS} steps, but not in this one",
            fix=f"restart the run: it begins with micro-batches of {smaller} rows; or set "
            f"training.micro_batch_size = {smaller}",
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an out-of-memory error of an accelerator or the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(each in str(error) for each in _MEMORY_ERRORS)


def _does_not_fit(rank: int, failure: str) -> TrainingError:
    return TrainingError(
        f"rank {rank} ran out of memory with a single sequence: {failure}",
        where="training.micro_batch_size",
        why="the micro-batch was reduced to one row",
        fix="set shard.activations = full or a shorter data.sequence_length, or use more ranks",
    )


def _is_data_parallel(model: nn.Module) -> bool:
    """Whether a step has no collectives inside layers; a trial would hang in them."""
    groups = compat.param_groups(model)
    return bool(groups) and all(compat.is_data_parallel(group) for group in groups)


def _is_distributed() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _read(record: Path) -> int | None:
    try:
        return int(record.read_text())
    except (OSError, ValueError):
        return None


def volatile_state(model: nn.Module) -> tuple[dict[str, Any], list[tuple[Tensor, Tensor]]]:
    """Return the state that a forward changes: random state, and each buffer with a copy."""
    return random_state(), [(buffer, buffer.detach().clone()) for buffer in model.buffers()]


def undo(model: nn.Module, state: tuple[dict[str, Any], list[tuple[Tensor, Tensor]]]) -> None:
    """Undo a failed or trial step, and free its memory."""
    recover(model)
    random_numbers, buffers = state
    set_random_state(random_numbers)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
