"""Models and data for the FSDP1 scripts beside this file: small enough for a CPU, shaped like real ones."""

import json
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

VOCABULARY = 61


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int = 2) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder with learned positions kept as a buffer, and a head of its own."""

    def __init__(self, width: int = 24, num_blocks: int = 3, length: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        angles = torch.arange(length)[:, None] / math.pow(50.0, 1 / width) ** torch.arange(width)
        self.register_buffer("positions", torch.sin(angles))
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.positions[: tokens.shape[1]].to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Captioner(nn.Module):
    """A frozen vision tower whose features are put before the text of a decoder."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.vision = nn.Sequential(nn.Linear(12, width), nn.GELU(), nn.Linear(width, width))
        self.decoder = GPT(width)
        self.vision.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        pixels = F.one_hot(tokens[:, :4] % 12, 12).to(next(self.vision.parameters()).dtype)
        bias = self.vision(pixels).mean(1, keepdim=True)
        x = self.decoder.embedding(tokens) + bias.to(self.decoder.embedding.weight.dtype)
        for block in self.decoder.blocks:
            x = block(x)
        return self.decoder.head(self.decoder.norm(x))


class Classifier(nn.Module):
    """Convolutions with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.fc = nn.Linear(8 * 4 * 4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.features(images).flatten(1))


def batch_of(step: int, rank: int, device: torch.device, num: int = 4, length: int = 12) -> torch.Tensor:
    """Tokens of one rank and step: counting up by a step that the model has to find out."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(0, VOCABULARY, (num, 1), generator=generator)
    stride = torch.randint(1, 4, (num, 1), generator=generator)
    return ((start + stride * torch.arange(length)) % VOCABULARY).to(device)


def images_of(step: int, rank: int, device: torch.device, num: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Images with a bright row, and which row it is."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    labels = torch.randint(0, 8, (num,), generator=generator)
    images = torch.randn(num, 1, 8, 8, generator=generator) * 0.3
    images[torch.arange(num), 0, labels] += 2.0
    return images.to(device), labels.to(device)


def language_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def log(step: int, loss: torch.Tensor, **values: float) -> None:
    """One JSON line from rank 0: the loss averaged over ranks."""
    mean = loss.detach().float().clone()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(json.dumps({"step": step, "loss": mean.item() / dist.get_world_size(), **values}), flush=True)
