import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device(f"cuda:{rank}")
    model = build().to(device)  # expect: SW235
    for l in model.layers:
        fully_shard(l)
    fully_shard(model)


main()
