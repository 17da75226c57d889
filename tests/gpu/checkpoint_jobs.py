"""What ranks do in the GPU tests of checkpoints; started by `shardwise.distributed.local_ranks.start_local`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise.checkpointing.manager import Checkpointer
from shardwise.config.schema import ShardConfig
from shardwise.sharding.apply import shard
from tests.gpu.jobs import loss_of, small, start_ranks, tokens


def save_and_resume(folder: str, asynchronous: bool, offload: bool) -> dict[str, Any]:
    """Save, train on at once, load into a new model: it must hold the state at the save."""
    rank, world_size = start_ranks()
    mesh = init_device_mesh("cuda", (world_size,), mesh_dim_names=("shard",))
    model, optimizer = _run(mesh, offload)
    _train(model, optimizer, rank, 2)
    with Checkpointer(folder, asynchronous=asynchronous) as checkpointer:
        expected, numbers = _state(model, optimizer), torch.cuda.get_rng_state()
        checkpointer.save(1, model=model, optimizers=optimizer)
        losses = _train(model, optimizer, rank, 3)  # changes everything while it is being copied
        checkpointer.wait()
        is_pinned = checkpointer._saver._arena._is_pinned
        other, fresh = _run(mesh, offload)
        checkpointer.load(model=other, optimizers=fresh)
        restored, found = _state(other, fresh), torch.cuda.get_rng_state()
        again = _train(other, fresh, rank, 3)
    dist.destroy_process_group()
    return {
        "equal": {name: torch.equal(restored[name], value) for name, value in expected.items()},
        "same names": restored.keys() == expected.keys(),
        "numbers": torch.equal(found, numbers),
        "pinned": is_pinned,
        "losses": (losses, again),
    }


def _run(mesh: Any, offload: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small()
    shard(model if offload else model.cuda(), ShardConfig(offload=offload), mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, num_steps: int) -> list[float]:
    losses = []
    for step in range(num_steps):
        loss = loss_of(model, tokens(rank, step).cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """This rank's part of everything, copied to the CPU."""
    found = {name: _local(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{key}": _local(value) for key, value in optimizer.state[parameter].items()}
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().cpu().clone()
