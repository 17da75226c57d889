import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh

from transformers import LlamaForCausalLM

model = LlamaForCausalLM.from_pretrained("x")
fully_shard(model.model.layers)  # expect: SW205
fully_shard(model)
