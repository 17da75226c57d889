"""Moved to FSDP2; the imports of FSDP1 stayed."""

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,  # expect: SW191
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardingStrategy,  # expect: SW191
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # expect: SW191
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy  # expect: SW191


class Tower(nn.Module):
    def __init__(self, width=128, depth=8):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        self.scale = nn.Parameter(torch.tensor(1.0))  # expect: SW214
        self.temperature = nn.Parameter(torch.ones([]) * 0.07)  # expect: SW214
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.blocks(x) * self.scale / self.temperature + self.shift


def build(offload: bool):
    mesh = init_device_mesh("cuda", (2, 4))  # expect: SW219
    model = Tower()
    config = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    if offload:
        config["offload_policy"] = CPUOffloadPolicy()
    for block in model.blocks:
        fully_shard(block, **config)
    return fully_shard(model, **config)
