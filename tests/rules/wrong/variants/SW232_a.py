import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh

model = build()
fully_shard(model.a)
fully_shard(model)
for i, x in enumerate(data):
    if i % 4 != 3:
        model.set_requires_gradient_sync(False)  # expect: SW232
    model(x).backward()
