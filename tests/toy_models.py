"""Small models that many tests share. A test with a shape of its own defines its own."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual feed-forward layer, normed at its entry."""

    def __init__(self, dim: int = 8, hidden: int | None = None) -> None:
        super().__init__()
        hidden = hidden or 4 * dim
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class PlainBlock(nn.Module):
    """A residual feed-forward layer without a norm."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Embedding, blocks in any holder, norm and head."""

    def __init__(self, blocks: nn.Module, dim: int = 8, vocab: int = 64) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(vocab, dim), blocks
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks:
            x = block(x)
        return self.head(self.norm(x))
