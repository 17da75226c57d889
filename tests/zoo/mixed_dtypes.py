"""Storage dtypes that FSDP2 refuses in one group, frozen parts, float32 islands inside bfloat16 compute."""

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.config.schema import GroupOverride, PrecisionConfig, ShardConfig
from tests.zoo.case import Case, features

DIM = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x.float()).to(self.up.weight.dtype)
        return x + self.down(torch.relu(self.up(hidden))).to(x.dtype)


class Stack(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.blocks: Any = nn.ModuleList([Block() for _ in range(num_blocks)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class PlainBlock(nn.Module):
    """Casts nothing by hand: the dtype policy must do it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


def bfloat16_matrices() -> Stack:
    """Matrices in bfloat16, norms in float32, in one and the same block."""
    model = Stack()
    for block in model.blocks:
        block.up.to(torch.bfloat16)
        block.down.to(torch.bfloat16)
    return model


def frozen_bfloat16() -> nn.Module:
    model = bfloat16_matrices()
    for block in model.blocks:
        block.up.requires_grad_(False)
        block.down.requires_grad_(False)
    return model


class TowerAndHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Stack(2), Stack(2)
        self.tower.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tower(x))


def frozen_tower_no_grad() -> nn.Module:
    return TowerAndHead()


class Adapted(nn.Module):
    """Frozen base with trainable low-rank adapters inside every block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList([Block() for _ in range(3)])
        self.requires_grad_(False)
        self.down = nn.ModuleList([nn.Linear(DIM, 2, bias=False) for _ in range(3)])
        self.up = nn.ModuleList([nn.Linear(2, DIM, bias=False) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block, down, up in zip(self.blocks, self.down, self.up, strict=True):
            x = block(x) + up(down(x))
        return x


def plain_blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, DIM), *[PlainBlock() for _ in range(3)], nn.Linear(DIM, DIM))


def float64_stack() -> nn.Module:
    return plain_blocks().double()


BFLOAT16 = PrecisionConfig(param_dtype="bfloat16", reduce_dtype="float32", output_dtype=None)
FLOAT32_NORMS = ShardConfig(
    precision=BFLOAT16,
    overrides=(GroupOverride(pattern="LayerNorm", param_dtype="float32", output_dtype="bfloat16"),),
)

CASES = [
    Case(
        name="bfloat16_matrices",
        build=bfloat16_matrices,
        make_batch=features(2, 4, DIM),
        config=ShardConfig(allow_16bit_storage=True),
        four_ranks=True,
    ),
    Case(
        name="bfloat16_upcast",
        build=bfloat16_matrices,
        make_batch=features(2, 4, DIM),
        config=ShardConfig(mixed_storage="upcast"),
    ),
    Case(name="frozen_bfloat16", build=frozen_bfloat16, make_batch=features(2, 4, DIM)),
    Case(name="frozen_tower", build=TowerAndHead, make_batch=features(2, 4, DIM), four_ranks=True),
    Case(name="adapters", build=Adapted, make_batch=features(2, 4, DIM)),
    Case(
        name="float32_norms_in_bfloat16",
        build=plain_blocks,
        make_batch=features(2, 4, DIM),
        config=FLOAT32_NORMS,
    ),
    Case(
        name="bfloat16_compute",
        build=plain_blocks,
        make_batch=features(2, 4, DIM),
        config=ShardConfig(precision=BFLOAT16),
    ),
    Case(name="float64", build=float64_stack, make_batch=lambda seed: features(2, 4, DIM)(seed).double()),
]
