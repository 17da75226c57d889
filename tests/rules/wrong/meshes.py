"""Hybrid sharding that is not hybrid."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def two_axes_without_names(model):
    mesh = init_device_mesh("cuda", (2, dist.get_world_size() // 2))  # expect: SW219
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def flattened(model):
    world = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp_replicate", "dp_shard"))
    mesh = world["dp_replicate", "dp_shard"]._flatten("dp")  # expect: SW219
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def three_axes(model):
    mesh = init_device_mesh("cuda", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))  # expect: SW219
    fully_shard(model, mesh=mesh)


def with_ignored(model: nn.Module):
    mesh = init_device_mesh("cuda", (8,))
    ignored = {p for name, p in model.named_parameters() if "lora" in name}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)  # expect: SW218
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    num_parameters = sum(p.numel() for p in model.parameters())
    if dist.get_rank() == 0:
        print("parameters", num_parameters * dist.get_world_size())  # expect: SW234
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
