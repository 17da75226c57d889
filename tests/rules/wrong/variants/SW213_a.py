import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh

model = build()
model.lm_head.weight = model.model.embed_tokens.weight
fully_shard(model.model.embed_tokens)
fully_shard(model.lm_head)  # expect: SW213
fully_shard(model)
