import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh


def main(args):
    model = build(args)
    param_groups = []
    for n, p in model.named_parameters():
        param_groups.append({"params": [p], "lr": args.lr})
    optimizer = torch.optim.AdamW(param_groups)  # expect: SW201
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
