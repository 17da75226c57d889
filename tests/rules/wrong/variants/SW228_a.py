import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh


class E:
    def __init__(self, model):
        self.model = fully_shard(model)

    def load(self, other):
        for (n, p), (_, q) in zip(self.model.named_parameters(), other.named_parameters()):
            p.data = q.data  # expect: SW228
