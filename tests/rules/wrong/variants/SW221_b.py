import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh

from safetensors.torch import save_file

model = build()
fully_shard(model.a)
fully_shard(model)
sd = model.state_dict()
sd = {k: v.contiguous() for k, v in sd.items()}
save_file(sd, "model.safetensors")  # expect: SW221
