"""What the skill's code blocks import: a model with a buffer that no state dict holds, data with unequal tokens."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

VOCABULARY, WIDTH, LENGTH = 32, 16, 8


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, num_layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("positions", torch.empty(LENGTH, WIDTH), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        angles = torch.arange(LENGTH * WIDTH, dtype=torch.float32).view(LENGTH, WIDTH)
        self.positions.copy_(torch.sin(angles))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embed(tokens) + self.positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Tokens(Dataset):
    """Sequences of which the first few tokens are not learnt: another number in each."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index >= len(self):
            raise IndexError(index)
        draw = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=draw)
        labels = (tokens + 1) % VOCABULARY
        labels[: index % (LENGTH - 1)] = -100
        return tokens, labels


def loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)


def build_model() -> Model:
    return Model()


def make_batch(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(1000 * step + rank))
