"""A small model trained by real FSDP1, and its state saved in every way FSDP1 has."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.toy_models import Block

VOCABULARY, WIDTH = 23, 10


class Tied(nn.Module):
    """Tied ends, a buffer, two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH, 23), Block(WIDTH, 23)])  # sizes that no number of ranks divides
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def build() -> Tied:
    torch.manual_seed(7)
    return Tied()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.95), weight_decay=0.1)


def wrap(*, use_orig_params: bool, with_mesh: bool, **settings: Any) -> FSDP:
    """The model under FSDP1; with a mesh its SHARDED state dict has DTensors, without one ShardedTensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if with_mesh else None
    return FSDP(
        build(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
        device_mesh=mesh,
        **settings,
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    """Each rank its own tokens; returns this rank's losses."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        tokens = torch.randint(VOCABULARY, (3, 6), generator=generator)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save_full(model: FSDP, optimizer: torch.optim.Optimizer, folder: Path) -> Path:
    state = _state(model, optimizer, StateDictType.FULL_STATE_DICT)
    if dist.get_rank() == 0:
        torch.save({**state, "epoch": 3}, folder / "checkpoint.pt")
    return folder / "checkpoint.pt"


def save_with_dcp(model: FSDP, optimizer: torch.optim.Optimizer, folder: Path) -> Path:
    dcp.save(_state(model, optimizer, StateDictType.SHARDED_STATE_DICT), checkpoint_id=folder / "dcp")
    return folder / "dcp"


def save_as_accelerate(model: FSDP, optimizer: torch.optim.Optimizer, folder: Path) -> Path:
    """The layout of accelerate's `save_fsdp_model` and `save_fsdp_optimizer`."""
    state = _state(model, optimizer, StateDictType.SHARDED_STATE_DICT)
    dcp.save({"model": state["model"]}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": state["optim"]}, checkpoint_id=folder / "optimizer_0")
    (folder / "scheduler.bin").write_bytes(b"not read")
    return folder


def save_rank_files(model: FSDP, optimizer: torch.optim.Optimizer, folder: Path) -> Path:
    state = _state(model, optimizer, StateDictType.SHARDED_STATE_DICT)
    with _quiet():
        torch.save(state, folder / f"state_rank{dist.get_rank()}.pt")
    return folder


def save_local(model: FSDP, optimizer: torch.optim.Optimizer, folder: Path) -> Path:
    """Flat parameters, and the optimizer's own state dict: what most scripts that use LOCAL save."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with _quiet(), FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        torch.save(model.state_dict(), folder / f"model.{rank:05d}-of-{world:05d}.pt")
    torch.save(optimizer.state_dict(), folder / f"optimizer.{rank:05d}-of-{world:05d}.pt")
    return folder


SAVERS: dict[str, Callable[[FSDP, torch.optim.Optimizer, Path], Path]] = {
    "full": save_full,
    "dcp": save_with_dcp,
    "accelerate": save_as_accelerate,
    "rank-files": save_rank_files,
    "local": save_local,
}


def _state(model: FSDP, optimizer: torch.optim.Optimizer, kind: StateDictType) -> dict[str, Any]:
    with _quiet(), FSDP.state_dict_type(model, kind):
        return {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}


def _quiet() -> warnings.catch_warnings:
    """FSDP1, ShardedTensor and what they call warn that they are going away; that is why we convert them."""
    return warnings.catch_warnings(action="ignore")
