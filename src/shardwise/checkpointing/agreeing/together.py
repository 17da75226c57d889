"""Ranks that hold one model between them: do a thing locally and fail alike, or let the first do it for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.checkpointing.agreeing.exchange import first_error, portable
from shardwise.ranks import on_rank_zero, raise_together
from shardwise.sharding.inventory import take_inventory
from shardwise.sharding.materialize import mesh_of
from shardwise.sharding.replicas import values_of_ranks

T = TypeVar("T")
S = TypeVar("S")


def mesh_of_model(model: nn.Module) -> DeviceMesh | None:
    """The ranks that hold the model; None in a single process without a process group."""
    return mesh_of(model, take_inventory(model))


def is_first(mesh: DeviceMesh | None) -> bool:
    """Whether this rank is the mesh's first."""
    coordinate = mesh.get_coordinate() if mesh is not None else []
    return coordinate is not None and not any(coordinate)


def together(work: Callable[[], T], mesh: DeviceMesh | None) -> T:
    """Do `work` on every rank; if it fails on one, raise on all.

    Ranks:
        Collective over the mesh. `work` must not communicate.
    """
    result: list[T] = []
    error: BaseException | None = None
    try:
        result.append(work())
    except Exception as caught:
        error = caught
    raise_over(mesh, error)
    return result[0]


def together_with(work: Callable[[], tuple[T, S]], mesh: DeviceMesh | None) -> tuple[T, list[S]]:
    """Do `work` on every rank; if it fails on one, raise on all. One exchange between the ranks instead of two.

    Args:
        work: Returns what this rank keeps, and a small value that all ranks get to know. Must not communicate.
        mesh: The ranks.

    Returns:
        What this rank keeps, and every rank's value, the first rank's first.

    Ranks:
        Collective over the mesh.
    """
    results: list[tuple[T, S]] = []
    error: BaseException | None = None
    try:
        results.append(work())
    except Exception as caught:
        error = caught
    told = values_of_ranks((portable(error), [value for _, value in results]), mesh)
    if error is not None:
        raise error
    if (failed := first_error([other for other, _ in told])) is not None:
        raise failed
    return results[0][0], [value for _, values in told for value in values]


def raise_over(mesh: DeviceMesh | None, error: BaseException | None) -> None:
    """Raise on every rank of the mesh if any of them brings an error.

    Ranks:
        Collective over the mesh.
    """
    # Along one axis after the other: an error reaches its own row first, then everybody.
    for group in _groups(mesh):
        try:
            raise_together(error, group=group)
        except Exception as caught:
            error = caught
    if error is not None:
        raise error


def on_first(work: Callable[[], T], mesh: DeviceMesh | None) -> T:
    """Run `work` on the first rank of the mesh and return its result, or raise its error, on every rank.

    Ranks:
        Collective over the mesh.
    """
    for group in _groups(mesh):
        work = _on_first_of(group, work)
    return work()


def _on_first_of(group: dist.ProcessGroup, work: Callable[[], T]) -> Callable[[], T]:
    return lambda: on_rank_zero(work, group=group)


def _groups(mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    return [mesh.get_group(axis) for axis in range(mesh.ndim)] if mesh is not None else []
