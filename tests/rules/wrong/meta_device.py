"""Ports an FSDP1 script that built on rank 0 and synchronised; here every rank builds on meta, and that is all."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard


class Rotary(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim), persistent=False)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.rotary = Rotary(width)
        self.proj = nn.Linear(width, width)


class Model(nn.Module):
    def __init__(self, width=512, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, width)


def shard(model):
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def from_scratch():
    with torch.device("meta"):
        model = Model()
    shard(model)
    model.to_empty(device="cuda")  # expect: SW209
    print(f"{count(model)} parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer


def from_checkpoint(path):
    with torch.device("meta"):
        model = Model()
    shard(model)
    model.to_empty(device="cuda")  # expect: SW210
    state = torch.load(path, mmap=True) if dist.get_rank() == 0 else {}
    set_model_state_dict(model, state, options=StateDictOptions(broadcast_from_rank0=True))  # expect: SW224
    return model


def never_materialized(batch):
    with torch.device("meta"):
        model = Model()  # expect: SW209
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch).sum().backward()
    optimizer.step()


def offloaded(batches):
    with torch.device("meta"):
        model = Model()
    for layer in model.layers:
        fully_shard(layer, offload_policy=CPUOffloadPolicy())
    fully_shard(model, offload_policy=CPUOffloadPolicy())
    model.to_empty(device="cuda")  # expect: SW236
    for layer in model.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    return model


def main():
    dist.init_process_group("nccl")  # expect: SW220
    torch.cuda.set_device(dist.get_rank())
    model, optimizer = from_scratch()
    never_materialized(torch.ones(2, 512))
    resumed = from_checkpoint("model.pt")
    offloaded([])
    return model, optimizer, resumed


if __name__ == "__main__":
    main()
