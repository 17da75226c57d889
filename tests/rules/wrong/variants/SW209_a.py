import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh


def main():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    for m in model:
        fully_shard(m)
    fully_shard(model)
    model = model.to_empty(device="cuda")  # expect: SW209
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in data:
        model(x).sum().backward()
        opt.step()
