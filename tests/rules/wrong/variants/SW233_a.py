import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh

from torch.nn.utils import clip_grad_norm_

model = build()
fully_shard(model.a)
fully_shard(model)
total_norm = clip_grad_norm_(model.parameters(), 1.0)
if dist.get_rank() == 0:
    print(f"gn={total_norm.item():.4f}")  # expect: SW233
