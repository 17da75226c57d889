import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy


def main():
    mp = MixedPrecisionPolicy(param_dtype=torch.half, reduce_dtype=torch.float32)  # expect: SW212
    model = build()
    for l in model.layers:
        fully_shard(l, mp_policy=mp)
    fully_shard(model, mp_policy=mp)
    model(1).backward()


main()
