import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh

model = build()
fully_shard(model.a)
fully_shard(model)
world_size = dist.get_world_size()
n = 0
for p in model.parameters():
    n += p.numel()
print(n * world_size)  # expect: SW234
