"""FSDP1 and FSDP2 side by side, chosen by a setting: neither is a leftover of the other."""

import copy

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def wrap(model, config):
    if config.version == 1:
        policy = MixedPrecision(param_dtype=torch.bfloat16)
        return FSDP(model, mixed_precision=policy, sharding_strategy=ShardingStrategy.FULL_SHARD)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def clip(model, max_norm):
    if isinstance(model, FSDP):
        return model.clip_grad_norm_(max_norm)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor() if isinstance(model, FSDPModule) else norm


def accumulate(model, is_last):
    if isinstance(model, FSDP) and not is_last:
        return model.no_sync()
    model.set_requires_gradient_sync(is_last)
    return None


class Trainer:
    def __init__(self, model, config):
        self.reference = copy.deepcopy(model)
        self.scaler = ShardedGradScaler() if config.version == 1 else torch.amp.GradScaler("cuda")
        if config.compile:
            for block in model.blocks:
                block.compile()
        optimizer = None
        if config.early_optimizer:
            optimizer = torch.optim.AdamW(model.parameters())
            if config.version == 2:
                raise ValueError("the optimizer has to wait")
        self.model = wrap(model, config)
        self.optimizer = optimizer or torch.optim.AdamW(self.model.parameters())

    def state(self):
        return self.model.state_dict()

    def evaluate(self, batches, rank):
        with torch.no_grad():
            losses = [self.model(batch) for batch in batches]
        if rank == 0:
            print(sum(loss.item() for loss in losses))
