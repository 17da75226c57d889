import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy


def main():
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.cuda.set_device(0)
    with torch.device("meta"):
        model = build()
    kw = dict(offload_policy=CPUOffloadPolicy())
    for l in model.layers:
        fully_shard(l, **kw)
    fully_shard(model, **kw)
    model.to_empty(device="cuda")  # expect: SW236
    model.reset_parameters()


main()
