import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy

from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

model = build()
fully_shard(model.a)
fully_shard(model)
opt = torch.optim.AdamW(model.parameters())
with FSDP.summon_full_params(model):  # expect: SW192
    print(model.weight)
osd = FSDP.optim_state_dict(model, opt)  # expect: SW192
