import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy

import torch.distributed.checkpoint.state_dict as sd


def main(rank):
    m = build()
    fully_shard(m.a)
    fully_shard(m)
    o = torch.optim.AdamW(m.parameters())
    msd, osd = sd.get_state_dict(m, o)
    if rank == 0:
        torch.save({"m": msd, "o": osd}, "x")  # expect: SW221


main(0)
