"""`device_id=` went with FSDP1, and nothing took its place."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from my_models import Block, build_model


def main(steps):
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    model = build_model().to(rank)  # expect: SW235
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        loss = model(torch.zeros(4, 128, dtype=torch.long, device="cuda")).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(int(sys.argv[1]))
