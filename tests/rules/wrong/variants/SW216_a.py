import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh

model = build()
for l in model.layers:
    fully_shard(l)
fully_shard(model)


@torch.no_grad()
def evaluate(model):
    return model(torch.zeros(1))


evaluate(model)
opt = torch.optim.AdamW(model.parameters())  # expect: SW216
