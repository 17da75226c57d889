"""Micro-batches that fit into memory: when any rank runs out of it, all ranks halve theirs and run the step again."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import compat
from shardwise.errors import ConfigError, TrainingError
from shardwise.sharding.recovery import recover
from shardwise.training.retreating import Retreat, Retreating

Batch = dict[str, Tensor]
T = TypeVar("T")


class Microbatches:
    """Cuts a rank's batch into parts, and finds out how large they may be.

    It does so where all collectives of a step are known: those of FSDP2 and of `shard`. With tensor parallelism, or
    where parameters are replicated only, running out of memory is an error like any other. Use it as a context, or
    `close` it.

    Args:
        model: Sharded or not.
        rows: Of this rank's batch; the same on every rank.
        size: Rows of a part. None: begin with all of them, and halve that on all ranks whenever one runs out of memory.
        report: Hears, on rank 0, when that happens.
        patience_s: How long ranks may take to leave a step together, before a rank that ran out of memory gives up.

    Raises:
        ConfigError: `size` is less than 1.

    Ranks:
        The constructor, `run` and `close` are collective.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: int,
        size: int | None = None,
        *,
        report: Callable[[str], None] | None = None,
        patience_s: float = 300.0,
    ) -> None:
        if size is not None and size < 1:
            raise ConfigError(
                f"training.micro_batch_size is {size}",
                where="training.micro_batch_size",
                why="a rank runs at least one sequence at once",
                fix="set it to 1 or more, or null to find it out",
            )
        self.size = max(1, min(rows, size or rows))
        """Rows of a part, now."""
        self.num_halvings = 0
        self._model, self._report = model, report or _print
        self._retreat = Retreat(model, patience_s=patience_s) if size is None and _can_retreat(model) else None
        self._can_halve = size is None and (self._retreat is not None or not _is_distributed())

    def __enter__(self) -> Microbatches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread that listens to the other ranks."""
        if self._retreat is not None:
            self._retreat.close()

    def split(self, batch: Batch) -> list[Batch]:
        """The batch in parts of `size` rows, the last one with what is left.

        Ranks:
            Local. All ranks have the same number of parts, as they have the same number of rows.
        """
        cut = {name: tensor.split(self.size) for name, tensor in batch.items()}
        return [dict(zip(cut, parts, strict=True)) for parts in zip(*cut.values(), strict=True)]

    def run(self, work: Callable[[list[Batch]], T], batch: Batch) -> T:
        """Run forward and backward over the parts of a batch; if any rank runs out of memory, again with smaller parts.

        What a failed attempt did is undone on every rank: gradients are dropped, random numbers put back. Buffers that
        a forward changes, as those of batch norm, keep the change.

        Args:
            work: Runs forward and backward for all parts, and calls no other collectives. No gradients may wait from
                before it.
            batch: Of this rank.

        Returns:
            What `work` returned.

        Raises:
            TrainingError: A single row does not fit. The same on every rank.

        Ranks:
            Collective. Costs one meeting of the processes, while accelerators go on working.
        """
        while True:
            random = _random_state()
            try:
                if self._retreat is None:
                    return work(self.split(batch))
                with self._retreat.attempt():
                    result = work(self.split(batch))
                    self._retreat.meet()
                    return result
            except Retreating:
                failure = None
            except Exception as error:
                if not (self._can_halve and is_out_of_memory(error)):
                    raise
                failure = str(error)
            # Only here is the failed attempt's last reference gone, which the exception held.
            failures = self._leave(failure)
            self._halve(failures)
            _set_random_state(random)

    def _leave(self, failure: str | None) -> dict[int, str]:
        if self._retreat is None:
            _forget(self._model)
            return {0: failure or ""}
        return self._retreat.leave(failure, lambda: _forget(self._model))

    def _halve(self, failures: dict[int, str]) -> None:
        ranks = ", ".join(map(str, failures))
        if self.size == 1:
            rank, text = next(iter(failures.items()))
            raise TrainingError(
                f"rank {rank} ran out of memory with a single sequence: {text}",
                where="training.micro_batch_size",
                why="the micro-batch has been halved down to one row, and that is the least",
                fix="set shard.activations = full or a shorter data.sequence_length, or use more ranks",
            )
        before, self.size = self.size, -(-self.size // 2)
        self.num_halvings += 1
        if not _is_distributed() or dist.get_rank() == 0:
            self._report(
                f"out of memory on rank {ranks}: micro-batches of {self.size} rows from now on, not {before}. "
                f"Set training.micro_batch_size = {self.size} to start with that."
            )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory, of an accelerator or of the machine, did not suffice."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _can_retreat(model: nn.Module) -> bool:
    """Whether every collective of a step is one of FSDP2's, or of ours at its end."""
    if not _is_distributed():
        return False
    groups = compat.param_groups(model)
    return bool(groups) and all(compat.num_shards(group) > 1 and compat.is_data_parallel(group) for group in groups)


def _is_distributed() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _forget(model: nn.Module) -> None:
    recover(model)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _random_state() -> list[tuple[torch.Generator, Tensor]]:
    generators = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return [(generator, generator.get_state()) for generator in generators]


def _set_random_state(states: list[tuple[torch.Generator, Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
