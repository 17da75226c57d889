import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh


def init(backend="nccl"):
    dist.init_process_group(backend)  # expect: SW220


def main(args):
    init()
    torch.cuda.set_device(0)
    model = build()
    off = CPUOffloadPolicy(pin_memory=True) if args.off else None
    for l in model.layers:
        fully_shard(l, offload_policy=off)
    fully_shard(model, offload_policy=off)


main(None)
