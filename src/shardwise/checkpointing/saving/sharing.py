"""Which rank writes what, so that everything is written once and all ranks write about as much. No torch.

Shards are known by their boxes: ranks that hold the same box of a tensor (replicas) share the work. Plain tensors and
values may differ between ranks though they have one name (running statistics, a position in the data): where they are
equal they are written once, and the ranks that differ from rank 0 write theirs under a name of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.checkpointing.contents import ITEM_BYTES, Box
from shardwise.errors import CheckpointError

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
