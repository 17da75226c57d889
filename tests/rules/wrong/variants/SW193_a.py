import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy

from torch.distributed.fsdp import ShardingStrategy

cfg = dict(sharding_strategy=ShardingStrategy.FULL_SHARD, device_id=torch.cuda.current_device())  # expect: SW193
model = build()
fully_shard(model.a, **cfg)
fully_shard(model, **cfg)
