"""A collective of a training step, described so that a rank that did not come to it can take part all the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise import compat


@dataclass(frozen=True, slots=True)
class StepCollective:
    """What all ranks must do at the same place. Plain values only: it travels as JSON."""

    kind: str
    """`gather`, `reduce`, `sum` (over the whole mesh, when backward ends) or `meet` (the end of the step)."""
    group: int = -1
    """Of FSDP2's groups, in the model's order."""
    num_elements: int = 0
    """Sent by each rank."""
    dtype: str = ""
    option: bool = False
    """Of `gather`: among fewer ranks, after forward; of `reduce`: then over replicas."""

    def join(self, groups: Sequence[Any], mesh: DeviceMesh | None) -> None:
        """Take part with zeros, and forget what comes.

        Args:
            groups: FSDP2's, in the model's order.
            mesh: The model's, where `shard` sharded it.

        Ranks:
            Collective, with ranks that run the step itself.
        """
        dtype = getattr(torch, self.dtype)
        if self.kind == "gather":
            compat.join_gather(groups[self.group], self.num_elements, dtype, among_fewer=self.option)
        elif self.kind == "reduce":
            compat.join_reduction(groups[self.group], self.num_elements, dtype, over_replicas=self.option)
        elif mesh is not None:
            zeros = torch.zeros(self.num_elements, dtype=dtype, device=mesh.device_type)
            for axis in range(mesh.ndim):
                dist.all_reduce(zeros, group=mesh.get_group(axis))


def dtype_name(tensor: torch.Tensor) -> str:
    """`float32` for `torch.float32`."""
    return str(tensor.dtype).removeprefix("torch.")
