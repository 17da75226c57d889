"""Nothing says which GPU belongs to this process."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from my_models import build_model

dist.init_process_group(backend="nccl")  # expect: SW235
model = build_model()
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
loss = model(torch.zeros(4, 128, dtype=torch.long, device="cuda")).mean()
loss.backward()
optimizer.step()
