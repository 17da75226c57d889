"""A small model with the shapes that go wrong, sharded with torch's own `fully_shard`, and its reference."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

M = TypeVar("M", bound=nn.Module)

FP32: dict[str, Any] = {"atol": 2e-6, "rtol": 1e-5}  # reductions over ranks sum in another order


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tiny(nn.Module):
    """Rows that no world size divides (7), a parameter with fewer rows than ranks, a tie, a frozen part."""

    def __init__(self, width: int = 6, num_blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.blocks: Any = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.frozen = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([1.5, 2.5]))
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, skip: Sequence[int] = ()) -> torch.Tensor:
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            if index not in skip:
                x = block(x)
        return self.head(self.frozen(x) * self.gain)


def tiny(seed: int = 0, **sizes: int) -> Tiny:
    """The same model on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Tiny(**sizes)


def tokens(rank: int, step: int = 0, num: int = 4) -> torch.Tensor:
    """A rank's own batch for one step."""
    return torch.randint(0, 7, (num, 3), generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, batch: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    logits = model(batch, **kwargs).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch.roll(1, 1).flatten())


def mesh_1d(num_ranks: int) -> DeviceMesh:
    return init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("shard",))


def mesh_2d() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def shard_by_hand(model: Tiny, mesh: DeviceMesh, **settings: Any) -> Tiny:
    """A copy with one group per block, and the root."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        shard_module(block, mesh, **settings)
    return shard_module(model, mesh, **settings)


def shard_module(module: M, mesh: DeviceMesh, **settings: Any) -> M:
    """`fully_shard`, typed as what it returns: the module itself."""
    fully_shard(module, mesh=mesh, **settings)
    return module


def reference_gradients(model: nn.Module, batches: Sequence[torch.Tensor], **kwargs: Any) -> dict[str, torch.Tensor]:
    """One process runs every rank's batch in turn and averages."""
    model = copy.deepcopy(model)
    for batch in batches:
        (loss_of(model, batch, **kwargs) / len(batches)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **tolerance: Any) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, **(tolerance or FP32), msg=lambda m, n=name: f"{n}: {m}")
