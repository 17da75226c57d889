import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh


def get(args):
    world = dist.get_world_size()
    shape = (world // 8, 8)
    return init_device_mesh("cuda", shape)  # expect: SW219


def main(args):
    model = build()
    fully_shard(model, mesh=get(args))


main(None)
