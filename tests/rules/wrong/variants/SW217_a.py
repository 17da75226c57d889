import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2)
        self.dec = nn.Linear(8, 8)

    def forward(self, x):
        return self.dec(self.enc(x))


def main(x):
    m = M()
    fully_shard(m.enc)
    fully_shard(m.dec)
    fully_shard(m)
    h = m.enc(x)  # expect: SW217
    y = m(x)


main(1)
