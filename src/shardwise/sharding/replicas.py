"""Tensors that must be equal on several ranks: compare fingerprints, or send one rank's to the others."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardwise.errors import ShardError
from shardwise.sharding.inventory import Entry
from shardwise.sharding.poison import fingerprint

T = TypeVar("T")


def values_of_ranks(value: T, mesh: DeviceMesh | None) -> list[T]:
    """What each rank of the mesh holds, the first rank's first; only this one's where there is no mesh.

    Ranks:
        Collective over the mesh. Small picklable values only.
    """
    values = [value]
    if mesh is None or dist.get_backend() == "fake":
        return values
    for axis in reversed(range(mesh.ndim)):
        gathered: list[list[T]] = [[]] * mesh.size(axis)
        dist.all_gather_object(gathered, values, group=mesh.get_group(axis))
        values = [value for part in gathered for value in part]
    return values


def broadcast_from_first(tensor: torch.Tensor, mesh: DeviceMesh, axes: Iterable[int]) -> None:
    """Overwrite `tensor` with the values it has on the first rank of each of the axes.

    Ranks:
        Collective over those axes. Needs one copy of the tensor at most.
    """
    with torch.no_grad():
        sent = tensor.detach().to(mesh.device_type).contiguous().view(-1).view(torch.uint8)
        for axis in axes:
            dist.broadcast(sent, group=mesh.get_group(axis), group_src=0)
        tensor.copy_(sent.view(tensor.dtype).view(tensor.shape))


def check_equal(entries: Sequence[Entry], mesh: DeviceMesh) -> None:
    """Raise on every rank if a tensor differs between ranks that should hold the same.

    Plain tensors and freshly initialised ones must be equal everywhere, shards along the axes that replicate.

    Raises:
        ShardError: Naming the first tensor that differs.

    Ranks:
        Collective. Two small all-reduces per mesh axis.
    """
    differing: dict[str, str] = {}
    for axis, axis_name in enumerate(_axis_names(mesh)):
        compared = [entry for entry in entries if axis in replicated_axes(entry, mesh)]
        if mesh.size(axis) > 1 and compared:
            differing |= dict.fromkeys(_differing(compared, mesh, axis), axis_name)
    # Ranks that share no copy of the tensor saw no difference: they must not go on alone.
    found = {name: axis for part in values_of_ranks(differing, mesh) for name, axis in part.items()}
    if found:
        first = next(entry.fqn for entry in entries if entry.fqn in found)
        raise ShardError(
            f"{first} differs between ranks" + (f", and {len(found) - 1} more" if len(found) > 1 else ""),
            where=f"mesh axis {found[first]}",
            why="ranks that hold copies of a tensor must start from the same values, or they drift apart",
            fix="materialize(model, init, sync_from_rank_zero=True); before sharding, if it has values",
        )


def replicated_axes(entry: Entry, mesh: DeviceMesh) -> list[int]:
    """The axes of `mesh` along which every rank must hold, or must have drawn, the same tensor."""
    if entry.fingerprint is not None or not isinstance(entry.tensor, DTensor):
        return list(range(mesh.ndim))
    placements = dict(zip(_axis_names(entry.tensor.device_mesh), entry.tensor.placements, strict=True))
    return [axis for axis, name in enumerate(_axis_names(mesh)) if isinstance(placements.get(name), Replicate)]


def _differing(entries: Sequence[Entry], mesh: DeviceMesh, axis: int) -> list[str]:
    prints = [entry.fingerprint if entry.fingerprint is not None else fingerprint(entry.local) for entry in entries]
    lowest = torch.stack([value.to(mesh.device_type) for value in prints])
    highest = lowest.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=mesh.get_group(axis))
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    return [entries[index].fqn for index in (lowest != highest).nonzero().flatten().tolist()]


def _axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or tuple(f"axis {index}" for index in range(mesh.ndim))
