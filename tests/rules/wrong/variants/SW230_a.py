import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh


class L(nn.Module):
    def forward(self, x, mode="train"):
        if mode == "train":
            return self.forward_train(x)
        return self.forward_infer(x)

    def forward_train(self, x):
        return x

    def forward_infer(self, x):
        return x


def wrap(model):
    for m in model.modules():
        if isinstance(m, L):
            fully_shard(m)
            register_fsdp_forward_method(m, "forward_train")  # expect: SW230
