import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy

from contextlib import nullcontext
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType, FullStateDictConfig  # expect: SW191


def train(model, data, accum):
    for l in model.layers:
        fully_shard(l)
    fully_shard(model)
    for i, x in enumerate(data):
        ctx = model.no_sync() if i % accum else nullcontext()  # expect: SW192
        with ctx:
            model(x).backward()
