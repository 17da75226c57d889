import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy


def step(model, batches):
    for b in batches[:-1]:
        model.set_requires_gradient_sync(requires_gradient_sync=False)  # expect: SW232
        model(b).backward()
    model(batches[-1]).backward()
