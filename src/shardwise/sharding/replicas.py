"""Tensors that must be equal on several ranks: compare them by fingerprint, or send the first rank's to the others."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardwise.errors import ShardError
from shardwise.sharding.inventory import Entry
from shardwise.sharding.poison import fingerprint


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
    for axis in range(mesh.ndim):
        compared = [entry for entry in entries if axis in replicated_axes(entry, mesh)]
        if mesh.size(axis) > 1 and compared:
            _check_axis(compared, mesh, axis)


def replicated_axes(entry: Entry, mesh: DeviceMesh) -> list[int]:
    """The axes of `mesh` along which every rank must hold, or must have drawn, the same tensor."""
    if entry.fingerprint is not None or not isinstance(entry.tensor, DTensor):
        return list(range(mesh.ndim))
    placements = dict(zip(_axis_names(entry.tensor.device_mesh), entry.tensor.placements, strict=True))
    return [
        axis for axis, name in enumerate(_axis_names(mesh)) if isinstance(placements.get(name), Replicate)
    ]


def _check_axis(entries: Sequence[Entry], mesh: DeviceMesh, axis: int) -> None:
    prints = [
        entry.fingerprint if entry.fingerprint is not None else fingerprint(entry.local) for entry in entries
    ]
    lowest = torch.stack([print_.to(mesh.device_type) for print_ in prints])
    highest = lowest.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=mesh.get_group(axis))
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    differing = (lowest != highest).nonzero().flatten().tolist()
    # Ranks of another row of the mesh may see no difference: they must not go on alone.
    flags = torch.tensor([len(differing)], device=mesh.device_type)
    for other in range(mesh.ndim):
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=mesh.get_group(other))
    if int(flags):
        names = [entries[index].fqn for index in differing] or ["a tensor of another part of the mesh"]
        raise ShardError(
            f"{names[0]} differs between ranks" + (f", and {len(names) - 1} more" if len(names) > 1 else ""),
            where=f"mesh axis {_axis_names(mesh)[axis]}",
            why="ranks that hold copies of a tensor must start from the same values, or they drift apart silently",
            fix="materialize(model, init, sync_from_rank_zero=True), before sharding if the model has values already",
        )


def _axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or tuple(f"axis {index}" for index in range(mesh.ndim))
