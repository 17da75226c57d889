import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh

from torch.optim import AdamW


class T:
    def setup(self):
        self.model = build()
        self.configure_optimizers()
        self.configure_model()

    def configure_optimizers(self):
        self.opt = AdamW(self.model.parameters())  # expect: SW201

    def configure_model(self):
        for l in self.model.layers:
            fully_shard(l)
        fully_shard(self.model)
