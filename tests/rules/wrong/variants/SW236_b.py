import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy

model = build()
fully_shard(model, offload_policy=CPUOffloadPolicy())
model.to_empty(device=torch.device("cuda"))  # expect: SW236
model.init_weights()
