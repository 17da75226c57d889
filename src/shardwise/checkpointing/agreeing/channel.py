"""The ranks' own line for checkpoints: a gloo group that training does not share, nor `destroy_process_group` end.

Collectives of a save run while training runs its own; on one group they could meet in another order on another rank,
and hang. The group is made from the default group's store and is known to nobody else, so that a save in the background
outlives the training group.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise import compat
from shardwise.checkpointing.storage.memory import bytes_of
from shardwise.errors import CheckpointError, ShardwiseError

T = TypeVar("T")
_TIMEOUT = timedelta(hours=4)  # a slow disk of one rank must not end the run of all


class Channel:
    """All ranks, or this process alone where there is no process group.

    One thread at a time may use it. Messages are pickled and trusted: they come from the ranks of this run.

    Ranks:
        Collective, and so is every method but `close`. Every rank must make its channels in the same order.
    """

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self._group: Any = None
        if dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake":
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size > 1:
            self._group = compat.private_gloo_group("shardwise/checkpoints", _TIMEOUT)

    def all_gather(self, value: T) -> list[T]:
        """What every rank brings, by rank."""
        if self._group is None:
            return [value]
        with _other_ranks():
            sent, lengths = self._padded(value)
            parts = [torch.empty_like(sent) for _ in range(self.size)]
            self._group.allgather([parts], [sent]).wait()
        return self._values(value, parts, lengths)

    def gather(self, value: T) -> list[T]:
        """What every rank brings, by rank, on rank 0; nothing on the others."""
        if self._group is None:
            return [value]
        with _other_ranks():
            sent, lengths = self._padded(value)
            parts = [torch.empty_like(sent) for _ in range(self.size if self.rank == 0 else 0)]
            compat.gather_on(self._group, sent, parts)
        return self._values(value, parts, lengths) if self.rank == 0 else []

    def broadcast(self, value: T) -> T:
        """What rank 0 brings."""
        if self._group is None:
            return value
        data = _to_bytes(value) if self.rank == 0 else _room(0)
        length = torch.tensor([len(data)], device="cpu")
        with _other_ranks():
            compat.broadcast_on(self._group, length)
            if self.rank != 0:
                data = _room(int(length))
            compat.broadcast_on(self._group, data)
        return value if self.rank == 0 else _from_bytes(data)

    def fail_together(self, error: BaseException | None) -> None:
        """Raise on every rank if any brings an error: its own where a rank has one, else the first rank's."""
        errors = self.all_gather(None if error is None else as_shardwise_error(error))
        if error is not None:
            raise error
        for rank, other in enumerate(errors):
            if other is not None:
                raise type(other)(f"rank {rank}: {other.what}", where=other.where, why=other.why, fix=other.fix)

    def close(self) -> None:
        """Leave. The other ranks may stay a moment longer."""
        self._group = None

    def _padded(self, value: object) -> tuple[torch.Tensor, list[int]]:
        """The value's bytes, as many as the longest of all ranks' has; and how long each really is."""
        data = _to_bytes(value)
        lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        self._group.allgather([lengths], [torch.tensor([len(data)], device="cpu")]).wait()
        sent = _room(max(int(length) for length in lengths))
        sent[: len(data)] = data
        return sent, [int(length) for length in lengths]

    def _values(self, own: T, parts: list[torch.Tensor], lengths: list[int]) -> list[T]:
        pairs = enumerate(zip(parts, lengths, strict=True))
        return [own if rank == self.rank else _from_bytes(part[:length]) for rank, (part, length) in pairs]


def as_shardwise_error(error: BaseException) -> ShardwiseError:
    """The error itself if it is one of ours, else one that says the same and can travel."""
    if isinstance(error, ShardwiseError):
        return error
    return CheckpointError(f"{type(error).__name__}: {error}", why="see the traceback of the rank that raised it")


@contextmanager
def _other_ranks() -> Iterator[None]:
    """Say in our words that another rank does not answer."""
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(
            "the ranks cannot reach each other for a checkpoint",
            where=str(error).splitlines()[0][:200],
            why="a rank has ended, or was killed, before the save or load that needed it",
            fix="see the first error of the other ranks; committed checkpoints are intact",
        ) from error


def _room(length: int) -> torch.Tensor:
    # On the CPU whatever the default device is; zeros, so that no memory of ours travels as padding.
    return torch.zeros(length, dtype=torch.uint8, device="cpu")


def _to_bytes(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _from_bytes(data: torch.Tensor) -> Any:
    return pickle.loads(bytes_of(data.contiguous()))
