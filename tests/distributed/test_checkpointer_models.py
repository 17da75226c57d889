"""Models as shardwise shards them: dtypes, replicated and ignored parameters, offload; factored optimizer states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise as sw
from shardwise.checkpointing.formats.sharded import read_manifest
from shardwise.checkpointing.manager import Checkpointer
from tests.by_hand import Block, full, mesh_1d, mesh_2d, shard_module
from tests.ranks import ranks


class Odd(nn.Module):
    """A scalar (kept whole on every rank), a bfloat16 part, a part that is not sharded, something of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.low = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.adapter = nn.Linear(6, 6)
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.vocabulary: dict[str, Any] = {"words": ["a"], "sizes": {1: (2, 3)}}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.adapter(x + self.low(x.bfloat16()).float()) * self.temperature

    def get_extra_state(self) -> Any:
        return {"vocabulary": self.vocabulary, "mask": torch.tensor([True, False])}

    def set_extra_state(self, state: Any) -> None:
        assert state["mask"].tolist() == [True, False]
        self.vocabulary = state["vocabulary"]


def odd(seed: int, mesh: Any, **settings: Any) -> nn.Module:
    torch.manual_seed(seed)
    config = sw.ShardConfig(ignored=("adapter.*",), **settings)
    return sw.shard(Odd(), config, mesh=mesh)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(t.detach()).clone() for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}


@ranks(4)
@pytest.mark.parametrize("settings", [{}, {"offload": True}], ids=["", "offload"])
def test_what_shard_makes_survives_another_mesh(rank: int, tmp_path: Path, settings: dict[str, Any]):
    mesh = mesh_1d(4)
    model = odd(0, mesh, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.randn(2, 6)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.vocabulary = {"words": ["b"], "sizes": {7: ()}}
    model.counts.add_(rank // 4)
    expected = whole(model)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model=model, optimizers=optimizer)
        other = odd(5, mesh_2d(), **settings)
        fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
        checkpointer.load(model=other, optimizers=fresh)
    found = whole(other)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    assert other.vocabulary == {"words": ["b"], "sizes": {7: ()}}
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        for key, value in optimizer.state[theirs].items():
            assert fresh.state[ours][key].dtype == value.dtype
            assert torch.equal(full(fresh.state[ours][key]), full(value)), key
    fresh.zero_grad()
    other(torch.randn(2, 6)).sum().backward()
    fresh.step()
    described = read_manifest(tmp_path / "step-00000001").details["models"][""]
    assert described["mesh"] == {"shard": 4}
    assert described["dtypes"] == ["bfloat16", "float32"]
    assert json.dumps(described["plan"])
    assert described["plan"]["axes"] == [["shard", 4]]


class Factored(torch.optim.Optimizer):
    """Keeps sums over rows and columns, laid out in their own ways, as memory-saving optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.ndim == 2 and isinstance(p, DTensor):
                whole = p.full_tensor()
                mesh = p.device_mesh
                self.state[p]["rows"] = distribute_tensor(whole.sum(1), mesh, p.placements)
                self.state[p]["columns"] = distribute_tensor(whole.sum(0), mesh, [Replicate()] * mesh.ndim)


@ranks(4)
def test_states_of_other_shapes_keep_their_layout(rank: int, tmp_path: Path):
    torch.manual_seed(0)
    model = shard_module(nn.Linear(7, 5), mesh_1d(4))
    optimizer = Factored(model.parameters())
    optimizer.step()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model=model, optimizers=optimizer)
        for mesh in (mesh_1d(4), mesh_2d()):
            other = shard_module(nn.Linear(7, 5), mesh)
            fresh = Factored(other.parameters())
            checkpointer.load(model=other, optimizers=fresh)
            state = fresh.state[other.weight]
            for key in ("rows", "columns"):
                assert isinstance(state[key], DTensor)
                assert torch.equal(state[key].full_tensor(), optimizer.state[model.weight][key].full_tensor())
            assert state["rows"].placements == ((Shard(0),) if mesh.ndim == 1 else (Replicate(), Replicate()))


@ranks(4)
def test_tensor_parallel_model_resumes_as_a_plain_one(rank: int, tmp_path: Path):
    """Rows interleaved by two axes: several boxes a rank, each written where it belongs."""
    torch.manual_seed(0)
    block = Block(8)
    expected = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard_module(block, mesh["shard"])
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model=block)
        other = shard_module(Block(8), mesh_1d(4))
        checkpointer.load(model=other)
        again = Block(8)
        parallelize_module(again, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        shard_module(again, mesh["shard"])
        checkpointer.load(model=again)
    for model in (other, again):
        for name, tensor in model.state_dict().items():
            assert torch.equal(full(tensor), expected[name]), name
