"""Which rank writes what in a save, and under which name. No torch, no communication."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from shardwise.checkpointing.contents import ChunkSpec, LocalChunk, StoredTensor
from shardwise.errors import CheckpointError

PER_RANK = "per_rank"


def name_of_rank(rank: int, name: str) -> str:
    """Where a rank stores what differs from rank 0's."""
    return f"{PER_RANK}.{rank}.{name}"


def dedup_chunks(tables: Sequence[Sequence[LocalChunk]]) -> list[list[int]]:
    """For each rank, which of its chunks it writes: places in its table, ascending.

    Args:
        tables: What each rank holds. All ranks must call it with the same.

    Raises:
        CheckpointError: Ranks hold tensors of one name that are not parts of the same tensor.
    """
    holders: dict[tuple[str, ChunkSpec], list[tuple[int, int]]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, table in enumerate(tables):
        for index, held in enumerate(table):
            dtype, shape = kinds.setdefault(held.name, (held.dtype, held.shape))
            if (dtype, shape) != (held.dtype, held.shape):
                raise CheckpointError(
                    f"ranks do not agree on {held.name}: {held.dtype} {list(held.shape)} on rank {rank}, "
                    f"{dtype} {list(shape)} on another",
                    where=held.name,
                    why="ranks hold parts of one tensor under one name",
                    fix="build the same model on every rank; name the models where ranks have different ones",
                )
            holders.setdefault((held.name, held.spec), []).append((rank, index))
    chosen: list[list[int]] = [[] for _ in tables]
    loads = [0] * len(tables)
    # What only one rank has comes first; then the large ones, to whoever has least so far.
    sized = [(tables[where[0][0]][where[0][1]].num_bytes, where) for where in holders.values()]
    for num_bytes, where in sorted(sized, key=lambda item: (len(item[1]) > 1, -item[0])):
        rank, index = min(where, key=lambda place: loads[place[0]])
        chosen[rank].append(index)
        loads[rank] += num_bytes
    return [sorted(indices) for indices in chosen]


def dedup_tensors(tables: Sequence[Mapping[str, StoredTensor]]) -> list[dict[str, str]]:
    """For each rank, which of its plain tensors it writes, and under which name.

    Args:
        tables: What each rank holds, by name. All ranks must call it with the same.
    """
    written: list[dict[str, str]] = [{} for _ in tables]
    loads = [0] * len(tables)
    for rank, table in enumerate(tables):
        for name, held in table.items():
            if tables[0].get(name) != held:
                written[rank][name] = name_of_rank(rank, name)
                loads[rank] += held.num_bytes
    # Sorted by name too: ranks that hold the same may hold it in different orders.
    for name, held in sorted(tables[0].items(), key=lambda item: (-item[1].num_bytes, item[0])):
        rank = min((rank for rank, table in enumerate(tables) if table.get(name) == held), key=lambda each: loads[each])
        written[rank][name] = name
        loads[rank] += held.num_bytes
    return written


def merge_values(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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


def digest(held: Mapping[str, Any]) -> int:
    """A number that differs when plain tensors, or encoded values, differ."""
    texts = {name: repr(value) if isinstance(value, StoredTensor) else value for name, value in held.items()}
    return xxhash.xxh3_64_intdigest(json.dumps(texts, sort_keys=True).encode())


def ranks_without_state(tables: Sequence[Sequence[LocalChunk]]) -> dict[str, set[int]]:
    """By name of an optimizer state, the ranks that hold a part of its parameter and should hold one of it.

    They should where the parts of all ranks do not make up the whole; and where another rank has the same part of
    the parameter, a replica of theirs, and does hold one.
    """
    held: dict[str, dict[int, set[ChunkSpec]]] = {}
    numels: dict[str, int] = {}
    for rank, table in enumerate(tables):
        for each in table:
            held.setdefault(each.name, {}).setdefault(rank, set()).add(each.spec)
            numels[each.name] = math.prod(each.shape)
    lacking: dict[str, set[int]] = {}
    for name, holders in held.items():
        if not name.startswith("optim."):
            continue
        parameter = name.partition(".state.")[2]
        while parameter and f"model.{parameter}" not in held:
            parameter = parameter.rpartition(".")[0]
        parts = held.get(f"model.{parameter}", {})
        others = parts.keys() - holders.keys()
        if others and sum(spec.numel for spec in set().union(*holders.values())) >= numels[name]:
            replicated = [parts[rank] for rank in holders if rank in parts]
            others = {rank for rank in others if parts[rank] in replicated}
        if others:
            lacking[name] = set(others)
    return lacking
