"""What a plain `shard` must not take for a divergence."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise.errors import ShardError
from shardwise.fsdp1 import FullyShardedDataParallel
from shardwise.sharding.apply import shard
from tests.ranks import ranks


@ranks(4)
def test_replicas_may_evaluate_on_their_own(rank: int):
    """All-gathers are collectives of a shard group; only reductions are those of all ranks."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)]), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with torch.no_grad():
            for _ in range(1 + rank // 2):
                model(torch.ones(2, 16))
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()


class Towers(nn.Module):
    """The second one is skipped by a rank without images."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = (FullyShardedDataParallel(nn.Linear(16, 16)) for _ in range(2))

    def forward(self, x: torch.Tensor, has_images: bool) -> torch.Tensor:
        return self.text(self.image(x) if has_images else x)


@ranks(2)
def test_fsdp1s_ranks_are_compared_too(rank: int):
    model = FullyShardedDataParallel(Towers())
    with pytest.raises(ShardError, match=r"image|text"):
        model(torch.ones(2, 16), rank == 0).sum().backward()
