"""How the ranks of a save or load share the work and fail together."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import compat
from shardwise.checkpointing.contents import ITEM_BYTES, Box
from shardwise.checkpointing.storage.memory import bytes_of
from shardwise.distributed.agreement import (
    as_shardwise_error,
    on_rank_zero,
    raise_on_all,
    run_and_gather,
    run_on_all,
)
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.sharding.inventory import take_inventory, values_of_ranks
from shardwise.sharding.materialize import mesh_of

PER_RANK = "per_rank"


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box of a tensor that a rank holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box

    @property
    def num_bytes(self) -> int:
        """Of the box."""
        return self.box.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A plain tensor that a rank holds: what tells it from other ranks' of the same name."""

    dtype: str
    shape: tuple[int, ...]
    checksum: int

    @property
    def num_bytes(self) -> int:
        """Of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def name_of_rank(rank: int, name: str) -> str:
    """Where a rank stores what differs from rank 0's."""
    return f"{PER_RANK}.{rank}.{name}"


def share_boxes(tables: Sequence[Sequence[HeldBox]]) -> list[list[int]]:
    """For each rank, which of its boxes it writes: places in its table, ascending.

    Args:
        tables: What each rank holds. All ranks must call it with the same.

    Raises:
        CheckpointError: Ranks hold tensors of one name that are not parts of the same tensor.
    """
    holders: dict[tuple[str, Box], list[tuple[int, int]]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, table in enumerate(tables):
        for index, held in enumerate(table):
            if kinds.setdefault(held.name, (held.dtype, held.shape)) != (held.dtype, held.shape):
                raise _not_the_same(held, kinds[held.name], rank)
            holders.setdefault((held.name, held.box), []).append((rank, index))
    chosen: list[list[int]] = [[] for _ in tables]
    loads = [0] * len(tables)
    # What only one rank has comes first; then the large ones, to whoever has least so far.
    sized = [(tables[where[0][0]][where[0][1]].num_bytes, where) for where in holders.values()]
    for num_bytes, where in sorted(sized, key=lambda item: (len(item[1]) > 1, -item[0])):
        rank, index = min(where, key=lambda place: loads[place[0]])
        chosen[rank].append(index)
        loads[rank] += num_bytes
    return [sorted(indices) for indices in chosen]


def share_tensors(tables: Sequence[Mapping[str, HeldTensor]]) -> list[dict[str, str]]:
    """For each rank, which of its plain tensors it writes, and under which name.

    Args:
        tables: What each rank holds, by name. All ranks must call it with the same.
    """
    written: list[dict[str, str]] = [{} for _ in tables]
    loads = [0] * len(tables)
    common: list[tuple[int, str, list[int]]] = []
    for name in _names(tables):
        shared = tables[0].get(name)
        equal = [rank for rank, table in enumerate(tables) if shared is not None and table.get(name) == shared]
        for rank, table in enumerate(tables):
            if name in table and rank not in equal:
                written[rank][name] = name_of_rank(rank, name)
                loads[rank] += table[name].num_bytes
        if shared is not None:
            common.append((shared.num_bytes, name, equal))
    for num_bytes, name, ranks in sorted(common, key=lambda item: (-item[0], item[1])):
        rank = min(ranks, key=lambda each: loads[each])
        written[rank][name] = name
        loads[rank] += num_bytes
    return written


def share_values(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All ranks' values: rank 0's under their names, those of ranks that differ under names of their own.

    Args:
        tables: Encoded values of each rank, by name.
    """
    merged = dict(tables[0])
    for rank, table in enumerate(tables):
        for name, value in table.items():
            if name not in tables[0] or repr(tables[0][name]) != repr(value):  # 1 == 1.0 == True
                merged[name_of_rank(rank, name)] = value
    return merged


def _names(tables: Iterable[Mapping[str, Any]]) -> list[str]:
    # Sorted: ranks that hold the same may hold it in different orders, and must all arrive at the same result.
    return sorted({name for table in tables for name in table})


def _not_the_same(held: HeldBox, other: tuple[str, tuple[int, ...]], rank: int) -> CheckpointError:
    return CheckpointError(
        f"ranks do not agree on {held.name}: {held.dtype} {list(held.shape)} on rank {rank}, "
        f"{other[0]} {list(other[1])} on another",
        where=held.name,
        why="ranks hold parts of one tensor under one name",
        fix="build the same model on every rank; name the models where ranks have different ones",
    )


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

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; if it fails on one, raise on all. `work` must not communicate."""
        return run_on_all(work, self.all_gather, CheckpointError)

    def raise_on_all(self, error: BaseException | None) -> None:
        """Raise on every rank if any brings an error: its own where a rank has one, else the first rank's."""
        raise_on_all(error, self.all_gather, CheckpointError)

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


def digest(held: Mapping[str, Any]) -> int:
    """A number that differs when plain tensors, or encoded values, differ."""
    texts = {name: repr(value) if isinstance(value, HeldTensor) else value for name, value in held.items()}
    return xxhash.xxh3_64_intdigest(json.dumps(texts, sort_keys=True).encode())


def names_to_write(channel: Channel, plain: dict[str, HeldTensor], digests: Sequence[int]) -> dict[str, str]:
    """The plain tensors that this rank writes, and under which names.

    Args:
        channel: The ranks.
        plain: This rank's.
        digests: Of every rank's; where they are equal nothing is sent.

    Ranks:
        Collective.
    """
    tables = [plain] * channel.size if len(set(digests)) == 1 else channel.all_gather(plain)
    return share_tensors(tables)[channel.rank]


def all_values(channel: Channel, values: dict[str, Any], digests: Sequence[int]) -> dict[str, Any]:
    """On rank 0 everything to be stored that is no tensor; nothing on the others.

    Args:
        channel: The ranks.
        values: This rank's, encoded.
        digests: Of every rank's; where they are equal nothing is sent.

    Ranks:
        Collective.
    """
    tables = [values] if len(set(digests)) == 1 else channel.gather(values)
    return share_values(tables) if channel.rank == 0 else {}


def portable(error: BaseException | None) -> ShardwiseError | None:
    """An error that can be sent to other ranks."""
    return None if error is None else as_shardwise_error(error, CheckpointError)


S = TypeVar("S")


def mesh_of_model(model: nn.Module) -> DeviceMesh | None:
    """The ranks that hold the model; None in a single process without a process group."""
    return mesh_of(model, take_inventory(model))


def is_first(mesh: DeviceMesh | None) -> bool:
    """Whether this rank is the mesh's first."""
    coordinate = mesh.get_coordinate() if mesh is not None else []
    return coordinate is not None and not any(coordinate)


def together(work: Callable[[], T], mesh: DeviceMesh | None) -> T:
    """Run `work` on every rank of the mesh; if it fails on one, raise on all.

    Ranks:
        Collective over the mesh. `work` must not communicate.
    """
    return together_with(lambda: (work(), None), mesh)[0]


def together_with(work: Callable[[], tuple[T, S]], mesh: DeviceMesh | None) -> tuple[T, list[S]]:
    """As `run_and_gather`, over a mesh.

    Ranks:
        Collective over the mesh. `work` must not communicate.
    """
    return run_and_gather(work, lambda value: values_of_ranks(value, mesh), CheckpointError)


def raise_over(mesh: DeviceMesh | None, error: BaseException | None) -> None:
    """Raise on every rank of the mesh if any of them brings an error.

    Ranks:
        Collective over the mesh.
    """
    raise_on_all(error, lambda value: values_of_ranks(value, mesh), CheckpointError)


def on_first(work: Callable[[], T], mesh: DeviceMesh | None) -> T:
    """Run `work` on the first rank of the mesh and return its result, or raise its error, on every rank.

    Ranks:
        Collective over the mesh.
    """
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)] if mesh is not None else []
    for group in groups:
        work = partial(on_rank_zero, work, group=group)
    return work()
