import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh

model = build()
fully_shard(model.a)
fully_shard(model)
gn = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()  # expect: SW233
total = 0.0
for p in model.parameters():
    if p.grad is not None:
        param_norm = p.grad.data.norm(2)
        total += param_norm.item() ** 2  # expect: SW233
