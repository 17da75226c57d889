"""A model with what sharding makes differences of: nested blocks, a buffer, BatchNorm, a part to ignore."""

from __future__ import annotations

import torch
from torch import nn


class Other(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.inner = (
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width, bias=False),
            Other(width),
        )
        self.register_buffer("scale", torch.full((width,), 1.0 + 2**-12))

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x))) * self.scale.to(x.dtype) + self.inner(x)
        return y if extra is None else y + (extra * 1e-3).to(y.dtype)


class Toy(nn.Module):
    def __init__(self, width: int = 8, *, with_norm: bool = False) -> None:
        super().__init__()
        self.side = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.norm = nn.BatchNorm1d(width) if with_norm else nn.Identity()
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = torch.linspace(0, 1, x.shape[-1], dtype=torch.float32)
        x = x + self.side(x)
        for block in self.blocks:
            x = block(x, extra)
        return self.head(self.norm(x))
