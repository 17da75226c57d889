import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy

import wandb

model = build()
fully_shard(model.a)
fully_shard(model)
opt = torch.optim.AdamW(model.parameters())


def train_step(x):
    model(x).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    return norm


for s in range(10):
    n = train_step(s)
    wandb.log({"norm": n.item()}, step=s)  # expect: SW233
