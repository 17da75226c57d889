import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh

import torch.optim as optim

model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
optimizer = optim.SGD(params=model.parameters(), lr=0.1)  # expect: SW201
scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
for m in model:
    fully_shard(m)
fully_shard(model)
