import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 4)


model = M()
mesh = init_device_mesh("cuda", (2,))
[fully_shard(m, mesh=mesh) for m in (model, model.enc)]  # expect: SW203
