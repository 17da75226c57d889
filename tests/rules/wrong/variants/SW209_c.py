import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy


def make(cfg):
    with torch.device("meta"):
        return Net(cfg)


def main(cfg):
    model = make(cfg)
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    model.to_empty(device="cuda")  # expect: SW209
    model.train()
    opt = torch.optim.AdamW(model.parameters())
    if cfg.resume:
        load(model)
    for x in cfg.data:
        model(x).backward()
        opt.step()


main(1)
