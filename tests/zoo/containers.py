"""Blocks held in every kind of place: Sequential, ModuleDict, nested lists, plain attributes, getattr."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.toy_models import PlainBlock as Block
from tests.zoo.case import Case, features

DIM = 16


class Root(nn.Module):
    """Subclasses say where the blocks are and how they are walked."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)


class InSequential(Root):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(self.inp(x)))


class InDict(Root):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: Block() for name in ("first", "second", "third")})

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks.values():
            x = block(x)
        return self.out(x)


class InDictByName(Root):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"a": Block(), "b": Block()})

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks["b"](self.blocks["a"](self.inp(x))))


class InNestedLists(Root):
    """Stages of blocks, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: Any = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return self.out(x)


class InPairs(Root):
    """Two kinds of module in each element of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList([nn.ModuleList([nn.LayerNorm(DIM), Block()]) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for norm, block in self.layers:
            x = block(norm(x))
        return self.out(x)


class InAttributes(Root):
    def __init__(self) -> None:
        super().__init__()
        self.block1, self.block2, self.block3 = Block(), Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        x = self.block1(x)
        x = self.block2(x)
        return self.out(self.block3(x))


class InNumberedAttributes(Root):
    def __init__(self) -> None:
        super().__init__()
        for i in range(3):
            self.add_module(f"layer{i}", Block())

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for i in range(3):
            x = getattr(self, f"layer{i}")(x)
        return self.out(x)


class Stage(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(depth)])
        self.scale = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.blocks(x))


class InStages(Root):
    """Blocks inside stages that are modules themselves and differ in depth."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: Any = nn.ModuleList([Stage(1), Stage(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for stage in self.stages:
            x = stage(x)
        return self.out(x)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self.module(*args, **kwargs)


def wrapped() -> nn.Module:
    """The real model two levels down, as wrappers leave it."""
    return Wrapper(Wrapper(InSequential()))


class InPlainList(Root):
    """Blocks are attributes, but the forward walks a plain list that also holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.block_list = []
        for i in range(3):
            self.add_module(f"b{i}", Block())
            self.block_list.append(getattr(self, f"b{i}"))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.block_list:
            x = block(x)
        return self.out(x)


def mlp() -> nn.Module:
    """Nothing but Linears of different sizes."""
    return nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


class MlpOfAttributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(DIM, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


CASES = [
    Case(name=name, build=build, make_batch=features(2, DIM), four_ranks=four_ranks)
    for name, build, four_ranks in (
        ("in_sequential", InSequential, True),
        ("in_dict", InDict, False),
        ("in_dict_by_name", InDictByName, False),
        ("in_nested_lists", InNestedLists, True),
        ("in_pairs", InPairs, False),
        ("in_attributes", InAttributes, False),
        ("in_numbered_attributes", InNumberedAttributes, False),
        ("in_stages", InStages, False),
        ("wrapped", wrapped, False),
        ("in_plain_list", InPlainList, False),
        ("mlp", mlp, True),
        ("mlp_of_attributes", MlpOfAttributes, False),
    )
]
