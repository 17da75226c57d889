"""Agreement between the ranks that hold a model, for saves and loads of its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.distributed.agreement import on_rank_zero, raise_together, run_and_gather, run_on_all
from shardwise.errors import CheckpointError
from shardwise.sharding.inventory import take_inventory
from shardwise.sharding.materialize import mesh_of

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
    """Run `work` on every rank of the mesh; if it fails on one, raise on all.

    Ranks:
        Collective over the mesh. `work` must not communicate.
    """
    return run_on_all(work, mesh, CheckpointError)


def together_with(work: Callable[[], tuple[T, S]], mesh: DeviceMesh | None) -> tuple[T, list[S]]:
    """As `run_and_gather`, over a mesh.

    Ranks:
        Collective over the mesh. `work` must not communicate.
    """
    return run_and_gather(work, mesh, CheckpointError)


def raise_over(mesh: DeviceMesh | None, error: BaseException | None) -> None:
    """Raise on every rank of the mesh if any of them brings an error.

    Ranks:
        Collective over the mesh.
    """
    raise_together(error, group=mesh, kind=CheckpointError)


def on_first(work: Callable[[], T], mesh: DeviceMesh | None) -> T:
    """Run `work` on the first rank of the mesh and return its result, or raise its error, on every rank.

    Ranks:
        Collective over the mesh.
    """
    return on_rank_zero(work, group=mesh)
