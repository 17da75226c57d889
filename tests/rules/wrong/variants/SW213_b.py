import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(wte=nn.Embedding(4, 4), h=nn.ModuleList([nn.Linear(4, 4) for _ in range(2)]))
        )
        self.lm_head = nn.Linear(4, 4, bias=False)
        self.transformer.wte.weight = self.lm_head.weight


def main():
    m = LM()
    for b in m.transformer.h:
        fully_shard(b)
    fully_shard(m.transformer.wte)
    fully_shard(m.lm_head)  # expect: SW213
    fully_shard(m)


main()
