"""A vision transformer: patches of a picture to one vector each. The seeing part of `multimodal`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """The shape of a vision transformer."""

    image_size: int
    """Height and width of a picture, in pixels."""
    patch_size: int
    """Height and width of a patch."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width inside the feed-forward."""
    num_layers: int
    """Blocks."""
    num_heads: int
    """Attention heads."""
    num_channels: int = 3
    """Colours."""

    @property
    def num_patches(self) -> int:
        """Patches of one picture."""
        return (self.image_size // self.patch_size) ** 2


class VisionBlock(nn.Module):
    """Attention among all patches, then feed-forward, each normalised before and added after."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.layer_norm1 = nn.LayerNorm(config.hidden_size)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size)
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """One layer; (batch, patches, hidden) in and out."""
        heads = self.qkv(self.layer_norm1(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.layer_norm2(x)), approximate="tanh"))


class VisionTower(nn.Module):
    """Patches, their places, blocks and the last norm."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.patch_embedding = nn.Linear(config.num_channels * config.patch_size**2, config.hidden_size)
        self.position_embedding = nn.Embedding(config.num_patches, config.hidden_size)
        self.layers = nn.ModuleList(VisionBlock(config) for _ in range(config.num_layers))
        self.post_layernorm = nn.LayerNorm(config.hidden_size)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Pictures (batch, colours, height, width) to (batch, patches, hidden)."""
        patches = F.unfold(pixel_values, self.patch_size, stride=self.patch_size).transpose(1, 2)
        x = self.patch_embedding(patches)
        x = x + self.position_embedding(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x)
        return self.post_layernorm(x)
