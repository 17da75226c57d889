import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy

import torch.distributed.checkpoint.state_dict as dsd

opts = dsd.StateDictOptions(broadcast_from_rank0=True, cpu_offload=True)  # expect: SW224
