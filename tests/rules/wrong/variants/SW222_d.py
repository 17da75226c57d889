import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy

from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, StateDictOptions


class CK:
    def __init__(self, rank):
        self.is_main = rank == 0

    def save(self, model, opt):
        if self.is_main:
            osd = get_optimizer_state_dict(model, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=True))  # expect: SW222
