import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh

mesh = init_device_mesh("cuda", mesh_shape=(2, 4))  # expect: SW219
model = build()
kwargs = {"mesh": mesh}
for l in model.layers:
    fully_shard(l, **kwargs)
fully_shard(model, **kwargs)
