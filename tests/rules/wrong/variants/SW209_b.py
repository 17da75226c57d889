import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh

from accelerate import init_empty_weights


class Runner:
    def __init__(self, cfg):
        with init_empty_weights():
            self.model = Net(cfg)
        for b in self.model.blocks:
            fully_shard(b)
        fully_shard(self.model)
        self.model.to_empty(device=torch.cuda.current_device())  # expect: SW209
        self.opt = torch.optim.AdamW(self.model.parameters())

    def step(self, x):
        self.model(x).backward()
        self.opt.step()
