import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy

from torch.distributed.fsdp import FullyShardedDataParallel


class T:
    def __init__(self, m):
        for b in m.blocks:
            fully_shard(b)
        self.m = fully_shard(m)

    def save(self):
        if isinstance(self.m, FullyShardedDataParallel):  # expect: SW194
            return 1
