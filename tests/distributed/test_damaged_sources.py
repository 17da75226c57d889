"""A damaged or hostile checkpoint of any format: the same error on every rank, and the model stays as it was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpointing.weights import load_weights
from shardwise.errors import CheckpointError
from shardwise.sharding.apply import shard
from tests.attacks.corrupting import MAKERS
from tests.attacks.exploits import EXPLOITS
from tests.attacks.test_hostile_pickles import PLACES
from tests.by_hand import mesh_1d
from tests.ranks import ranks
from tests.unit.checkpointing.every_format import model_state


class Block(nn.Module):
    """With the names of `every_format.model_state`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3, 2, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.zeros(9, dtype=torch.float16))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("empty", torch.zeros(0, 4))


class Model(nn.Module):
    """Tied ends around a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(7, 5), Block(), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens)) * self.block.bias.sum() * self.block.weight.sum()


def sharded_model() -> nn.Module:
    torch.manual_seed(0)
    return shard(Model(), mesh=mesh_1d(2))


@pytest.mark.parametrize("format", MAKERS)
@ranks(2)
def test_what_is_not_damaged_is_loaded(rank: int, tmp_path: Path, format: str):
    """Else the tests below would prove nothing."""
    where = [str(MAKERS[format](tmp_path))] if rank == 0 else [""]
    dist.broadcast_object_list(where)
    model = sharded_model()
    load_weights(model, where[0])
    expected = model_state()["block.weight"]
    assert torch.equal(whole_of(model.get_parameter("block.weight")), expected)
    dist.barrier()


def whole_of(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


def check_refused(rank: int, path: Path, folder: Path) -> None:
    """Every rank raises the same error, and no parameter has changed."""
    model = sharded_model()
    before = [whole_of(parameter) for parameter in model.parameters()]
    with pytest.raises(CheckpointError) as error:
        load_weights(model, path)
    said: list[str] = [""] * 2
    dist.all_gather_object(said, f"{error.value.what.removeprefix('rank 0: ').removeprefix('rank 1: ')}")
    assert said[0] == said[1]
    assert str(folder) in error.value.where
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(whole_of(parameter), value)


@pytest.mark.parametrize("format", MAKERS)
@pytest.mark.parametrize("damage", ["cut", "empty", "delete"])
@ranks(2)
def test_damage_is_the_same_error_on_every_rank(rank: int, tmp_path: Path, format: str, damage: str):
    where = [""]
    if rank == 0:
        path = MAKERS[format](tmp_path)
        file = max((file for file in tmp_path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
        if damage == "delete":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] if damage == "cut" else b"")
        where = [str(path)]
    dist.broadcast_object_list(where)
    check_refused(rank, Path(where[0]), tmp_path)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(tmp_path)


@pytest.mark.parametrize("place", PLACES)
@ranks(2)
def test_a_hostile_pickle_is_the_same_error_on_every_rank(rank: int, tmp_path: Path, place: str):
    mark, where = tmp_path / "pwned", [""]
    if rank == 0:
        (tmp_path / "checkpoint").mkdir()
        where = [str(PLACES[place](tmp_path / "checkpoint", EXPLOITS["by_reduce"](mark)))]
    dist.broadcast_object_list(where)
    check_refused(rank, Path(where[0]), tmp_path)
    assert not mark.exists()
