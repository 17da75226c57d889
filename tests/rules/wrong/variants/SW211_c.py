import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy

bf16 = torch.bfloat16


class Cfg:
    pass


def f(cfg):
    if cfg.precision == "bf16":
        pd = bf16
    else:
        pd = torch.float32
    return MixedPrecisionPolicy(param_dtype=pd)  # expect: SW211
