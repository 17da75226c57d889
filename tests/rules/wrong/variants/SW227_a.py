import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh

from copy import deepcopy

model = build()
for l in model.layers:
    fully_shard(l)
fully_shard(model)
ema = deepcopy(model)  # expect: SW227
