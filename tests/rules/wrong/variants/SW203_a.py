import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh


def shard(model):
    model = fully_shard(model)
    for name, block in model.named_modules():
        if isinstance(block, nn.TransformerEncoderLayer):
            fully_shard(block)  # expect: SW203
    return model
