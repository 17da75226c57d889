import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard, MixedPrecision  # expect: SW191
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy  # expect: SW191

fully_shard(torch.nn.Linear(3, 3))
