import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy


def wrap(model, frozen):
    ignored = set()
    for n, p in model.named_parameters():
        if not p.requires_grad:
            ignored.add(p)
    for b in model.blocks:
        fully_shard(b)  # expect: SW218
    fully_shard(model, ignored_params=ignored)
