import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh

from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as cw

model = build()
for l in model.layers:
    fully_shard(l)
fully_shard(model)
cw.apply_activation_checkpointing(model, checkpoint_wrapper_fn=cw.checkpoint_wrapper, check_fn=lambda m: True)  # expect: SW206
