import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy


class T:
    def __init__(self, cfg):
        self.model = build(cfg)
        self.model = torch.compile(self.model, mode="max-autotune")  # expect: SW208
        for b in self.model.blocks:
            fully_shard(b)
        fully_shard(self.model)
