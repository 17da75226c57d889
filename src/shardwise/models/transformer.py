"""The tutorial's small Transformer for a laptop: learned positions, multi-head attention, GELU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.config.schema import PositiveInt, Strict


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig(Strict):
    """The shape of a small Transformer."""

    vocab_size: PositiveInt = 257
    """Number of tokens in the vocabulary; 257 for bytes and the end-of-document token."""
    max_sequence_length: PositiveInt = 256
    """Maximum sequence length; each position has a learned vector."""
    width: PositiveInt = 128
    """Width of the residual stream."""
    num_layers: PositiveInt = 4
    """Number of blocks."""
    num_heads: PositiveInt = 4
    """Number of attention heads."""
    dropout: float = 0.0
    """Probability of dropping a value after each half of a block."""


SHAPES: dict[str, TransformerConfig] = {"tutorial": TransformerConfig()}


class SelfAttention(nn.Module):
    """Causal attention over all heads at once."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply causal attention."""
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class GeluFeedForward(nn.Module):
    """Two projections with a GELU between them."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.widen = nn.Linear(config.width, 4 * config.width)
        self.narrow = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward to each position."""
        return self.narrow(F.gelu(self.widen(x)))


class Block(nn.Module):
    """Attention, then feed-forward, each with pre-norm and residual connection."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = SelfAttention(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward = GeluFeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """One layer of the residual stream."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Transformer(nn.Module):
    """Token and position vectors, blocks, a norm and the output matrix."""

    tensor_plan: ClassVar[dict[str, str]] = {
        "*.query_key_value": "colwise_gather_output",  # three projections in one
        "*.attention.output": "rowwise_split_input",
        "*.widen": "colwise",
        "*.narrow": "rowwise",
        **dict.fromkeys(("*.attention_norm", "*.feed_forward_norm"), "sequence"),
    }
    """Tensor-parallel plan, as in `TensorConfig.plan`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.max_sequence_length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.output = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Tokens (batch, length) to logits (batch, length, vocabulary)."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.token_embedding(input_ids) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))
