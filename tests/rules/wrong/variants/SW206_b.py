import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as ptd_checkpoint_wrapper


def apply_ac(model):
    for layer_id, block in model.layers.named_children():
        block = ptd_checkpoint_wrapper(block, preserve_rng_state=False)  # expect: SW206
        model.layers.register_module(layer_id, block)


def apply_fsdp(model):
    for layer_id, block in model.layers.named_children():
        fully_shard(block)
    fully_shard(model)


def parallelize(model):
    apply_fsdp(model)
    apply_ac(model)
