import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy


def build_all(cfg):
    model = make(cfg).cuda()
    optimizer, scheduler = create_optimizer_and_scheduler(model, cfg)
    for l in model.layers:
        fully_shard(l)
    fully_shard(model)
    return model, optimizer


def create_optimizer_and_scheduler(model, cfg):
    opt = torch.optim.AdamW(  # expect: SW201
        [
            {"params": [p for n, p in model.named_parameters() if "bias" in n], "weight_decay": 0.0},
            {"params": [p for n, p in model.named_parameters() if "bias" not in n]},
        ],
        lr=cfg.lr,
    )
    return opt, torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 1)
