import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh

from transformers import AutoModelForCausalLM


class FSDPTrainer:
    def __init__(self, name):
        self.model = AutoModelForCausalLM.from_pretrained(name)
        self._wrap()
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def _wrap(self):
        fully_shard(self.model, mesh=init_device_mesh("cuda", (dist.get_world_size(),)))  # expect: SW202
