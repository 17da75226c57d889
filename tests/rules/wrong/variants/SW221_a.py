import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh


def save_checkpoint(model, optimizer, epoch, path):
    torch.save(  # expect: SW221
        {"epoch": epoch, "model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}, path
    )


def main():
    model = build()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters())
    if dist.get_rank() == 0:
        save_checkpoint(model, opt, 1, "x.pt")


main()
