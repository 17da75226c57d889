import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.Linear(3, 3)
        self.logit_scale = nn.Parameter(torch.ones([]) * 2.65)  # expect: SW214
        self.logit_bias = nn.Parameter(torch.zeros(()))  # expect: SW214


def main():
    model = CLIP()
    fully_shard(model.visual)
    fully_shard(model)


main()
