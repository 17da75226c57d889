"""Checkpoints between meshes with data, tensor and expert axes: each reads each, bit by bit, and so does one process.

The models are sharded by torch alone (`parallelize_module`, `distribute_tensor`, `fully_shard`), sizes do not divide,
and what is compared are the local tensors that torch itself made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise as sw
from tests.ranks import ranks


class Experts(nn.Module):
    """Weights of experts, stacked: of 4 that divide evenly, and of 3 that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.four = nn.Parameter(torch.randn(4, 6, 5))
        self.three = nn.Parameter(torch.randn(3, 4, 2))


class Net(nn.Module):
    """Rows and columns that two and four ranks divide, that they divide unevenly, and too few of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(6, rows) for rows in (8, 9, 5, 2, 13))
        self.down = nn.ModuleList(nn.Linear(columns, 7) for columns in (8, 5))
        self.experts = Experts()
        self.norm = nn.LayerNorm(3)
        self.register_buffer("steps", torch.arange(5.0))


def trained(shard: Callable[[Net], None], seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    """A model, sharded, after one step whose gradients are functions of the weights alone."""
    torch.manual_seed(seed)
    model = Net()
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone() * 0.5
    optimizer.step()
    return model, optimizer


def over_shards(mesh: DeviceMesh) -> Callable[[Net], None]:
    def shard(model: Net) -> None:
        for module in (*model.up, *model.down, model.experts, model):
            fully_shard(module, mesh=mesh)

    return shard


def over_tensor(mesh: DeviceMesh, data: DeviceMesh) -> Callable[[Net], None]:
    def shard(model: Net) -> None:
        plan = {f"up.{index}": ColwiseParallel() for index in range(len(model.up))}
        parallelize_module(model, mesh, {**plan, "down.0": RowwiseParallel(), "down.1": RowwiseParallel()})
        over_shards(data)(model)

    return shard


def over_experts(mesh: DeviceMesh, dim: int) -> Callable[[Net], None]:
    """Experts over `expert`, then `shard`; all else over both."""
    both = mesh._flatten("both")

    def shard(model: Net) -> None:
        for name, parameter in list(model.experts.named_parameters()):
            placed = distribute_tensor(parameter.data, mesh["expert"], [Shard(0)], src_data_rank=None)
            setattr(model.experts, name, nn.Parameter(placed))
        fully_shard(model.experts, mesh=mesh["shard"], shard_placement_fn=lambda parameter: Shard(dim))
        for module in (*model.up, *model.down, model):
            fully_shard(module, mesh=both)

    return shard


def layouts() -> dict[str, Callable[[Net], None]]:
    def mesh(shape: tuple[int, ...], *names: str) -> DeviceMesh:
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    tensor, hybrid = mesh((2, 2), "shard", "tensor"), mesh((2, 1, 2), "replicate", "shard", "tensor")
    return {
        "shard 4": over_shards(mesh((4,), "shard")),
        "shard 2, tensor 2": over_tensor(tensor["tensor"], tensor["shard"]),
        "replicate 2, shard 2": over_shards(mesh((2, 2), "replicate", "shard")),
        "expert 2, shard 2": over_experts(mesh((2, 2), "expert", "shard"), 0),
        "expert 2, shard 2 along the rows": over_experts(mesh((2, 2), "shard", "expert"), 1),
        "replicate 2, tensor 2": over_tensor(hybrid["tensor"], hybrid["replicate", "shard"]),
        "shard 1, tensor 4": over_tensor((whole := mesh((1, 4), "shard", "tensor"))["tensor"], whole["shard"]),
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return {name: local(tensor.detach()) for name, tensor in found.items()}


def check_pairs(rank: int, folder: Path, pairs: list[tuple[str, str]], known: dict[str, Callable[[Net], None]]) -> None:
    expected = tensors_of(*trained(lambda model: None))
    for saved in dict.fromkeys(saved for saved, _ in pairs):
        model, optimizer = trained(known[saved])
        with sw.Checkpointer(folder / saved, asynchronous=False) as checkpointer:
            checkpointer.save(1, model=model, optimizers=optimizer)
        sw.save_weights(model, folder / f"{saved}.safetensors")
        stored = load_file(folder / f"{saved}.safetensors")
        alone = Net()
        sw.load_weights(alone, folder / saved)
        for name, tensor in alone.state_dict().items():
            assert torch.equal(stored[name], expected[name]), (saved, name)
            assert torch.equal(tensor, expected[name]), (saved, name)
        assert sw.verify_checkpoint(folder / saved) == []
    for saved, wanted in pairs:
        reference = tensors_of(*trained(known[wanted]))
        model, optimizer = trained(known[wanted], seed=1)
        with sw.Checkpointer(folder / saved, asynchronous=False) as checkpointer:
            checkpointer.load(model=model, optimizers=optimizer)
        for name, tensor in tensors_of(model, optimizer).items():
            assert torch.equal(tensor, reference[name]), (saved, wanted, name)


@ranks(4, timeout_s=120)
def test_each_mesh_hands_over_to_the_next(rank: int, tmp_path: Path):
    known = layouts()
    names = list(known)
    check_pairs(rank, tmp_path, list(zip(names, [*names[1:], names[0]], strict=True)), known)


@pytest.mark.slow
@ranks(4, timeout_s=300)
def test_every_mesh_reads_every_other(rank: int, tmp_path: Path):
    known = layouts()
    check_pairs(rank, tmp_path, [(saved, wanted) for saved in known for wanted in known], known)
