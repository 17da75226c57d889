import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh


def apply(model):
    for i, layer in enumerate(model.layers):
        fully_shard(layer)  # expect: SW203, SW204
    fully_shard(model)  # expect: SW204


def main(model):
    apply(model)
    apply(model)
