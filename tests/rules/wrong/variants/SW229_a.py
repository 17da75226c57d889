import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh


def loss_fn(model, x):
    return model.forward(x).mean()  # expect: SW229


def main():
    model = build()
    fully_shard(model.a)
    fully_shard(model)
    loss_fn(model, 1).backward()


main()
