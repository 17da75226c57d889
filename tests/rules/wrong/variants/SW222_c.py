import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh

model = build()
fully_shard(model)
rank = dist.get_rank()
if rank == 0:
    w = model.lm_head.weight.full_tensor()  # expect: SW222
    print(w.mean())
