"""Where a rank's part of a DTensor lies in the full tensor. Arithmetic only, no communication."""

from dataclasses import dataclass
from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """A tensor cut along one dimension over one mesh axis, and whole along every other axis.

    All parts but the last ones hold `part_size` rows; the last may be shorter or empty (torch.chunk's rule).
    """

    mesh: DeviceMesh
    axis: int
    dim: int
    size: int
    """Rows of the full tensor along `dim`."""

    @property
    def num_parts(self) -> int:
        """Ranks that hold one copy between them."""
        return self.mesh.size(self.axis)

    @property
    def part_size(self) -> int:
        """Rows of the first, and fullest, part."""
        return -(-self.size // self.num_parts)

    def bounds(self, part: int) -> tuple[int, int]:
        """First row of a part, and how many rows it has."""
        start = min(part * self.part_size, self.size)
        return start, min(self.part_size, self.size - start)


def layout_of(tensor: DTensor) -> ShardLayout | None:
    """The layout of `tensor`, or None unless it is cut along exactly one mesh axis in the plain way."""
    axes = sharded_axes(tensor)
    if len(axes) != 1:
        return None
    placement = tensor.placements[axes[0]]
    if type(placement) is not Shard:  # tensor parallelism interleaves parts (_StridedShard)
        return None
    dim = placement.dim % tensor.ndim
    return ShardLayout(tensor.device_mesh, axes[0], dim, tensor.shape[dim])


def sharded_axes(tensor: DTensor) -> tuple[int, ...]:
    """Mesh axes over which the ranks hold different values of `tensor`."""
    return tuple(axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate())


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, sharing its memory, without gradient; a plain tensor is its own part."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if not torch.is_grad_enabled():  # the switch costs more than the rest, and there may be thousands
        return tensor.to_local()
    with torch.no_grad():
        return tensor.to_local()


def local_part(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `full` when it is laid out like `like`.

    Ranks:
        Local. Every rank must bring the same `full`, or at least its own part of it.
    """
    if not isinstance(like, DTensor) or not sharded_axes(like):
        return full
    layout = layout_of(like)
    if layout is not None:
        start, length = layout.bounds(layout.mesh.get_local_rank(layout.axis))
        return full.narrow(layout.dim, start, length)
    replicated = [Replicate()] * like.device_mesh.ndim
    whole = DTensor.from_local(full, like.device_mesh, replicated, run_check=False)
    return cast(DTensor, whole.redistribute(placements=like.placements)).to_local()
