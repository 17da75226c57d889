import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh


def pol():
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # expect: SW211
