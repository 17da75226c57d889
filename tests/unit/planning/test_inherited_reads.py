"""Weights that are read and not called through methods that a class inherits and extends: they are found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw


class Shelf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def __getitem__(self, index: int) -> Any:
        return self.layers[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.layers)

    def __getattr__(self, name: str) -> Any:
        if name == "last":
            return self.layers[2]
        return super().__getattr__(name)

    @property
    def first(self) -> Any:
        return self.layers[0]

    def pick(self, index: int) -> Any:
        return self.layers[index]


class Further(Shelf):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)

    @property
    def first(self) -> Any:
        return super().first

    def pick(self, index: int) -> Any:
        return super().pick(index)


class Block(nn.Module):
    def __init__(self, kind: type[Shelf]) -> None:
        super().__init__()
        self.shelf, self.out = kind(), nn.Linear(8, 8)


class ByItem(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.linear(x, self.shelf[0].weight))


class ByLoop(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.shelf:
            x = F.linear(x, layer.weight)
        return self.out(x)


class ByProperty(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.linear(x, self.shelf.first.weight))


class ByMethod(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.linear(x, self.shelf.pick(1).weight))


class ByFallback(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.linear(x, self.shelf.last.weight))


class Net(nn.Module):
    def __init__(self, block: type[Block], kind: type[Shelf]) -> None:
        super().__init__()
        self.block, self.head = block(kind), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x))


@pytest.mark.parametrize("kind", [Shelf, Further])
@pytest.mark.parametrize(
    ("block", "held"), [(ByItem, [0]), (ByLoop, [0, 1, 2]), (ByProperty, [0]), (ByMethod, [1]), (ByFallback, [2])]
)
def test_groups_that_are_read_without_a_call_stay_gathered(block: type[Block], kind: type[Shelf], held: list[int]):
    config, mesh = sw.ShardConfig(block_classes=("Linear",)), sw.MeshConfig(shard=2, device="cpu")
    plan = sw.plan(Net(block, kind), config, mesh=mesh)
    assert [group.name for group in plan.groups if group.held] == [f"block.shelf.layers.{index}" for index in held]


class Entered(nn.Linear):
    """A layer that is used between `__enter__` and `__exit__`."""

    def __enter__(self) -> Entered:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class WithName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other, self.head = Entered(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.other(x)
        with self.inner as layer:
            x = F.linear(x, layer.weight)
        return self.head(x)


def test_a_layer_that_a_with_statement_names_is_read():
    config, mesh = sw.ShardConfig(block_patterns=("inner", "other")), sw.MeshConfig(shard=2, device="cpu")
    plan = sw.plan(WithName(), config, mesh=mesh)
    assert [(group.name, group.held) for group in plan.groups] == [("inner", True), ("other", False), ("(root)", False)]
