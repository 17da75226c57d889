"""A language model whose every matrix exists twice: for what it understands, and for the picture it makes.

The language part of `multimodal`. In evaluation mode it also takes and returns keys and values of earlier calls.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.models.llama import Embedding, FeedForward, Linear, LlamaConfig, RMSNorm, RotaryEmbedding, rotate

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of every layer, each (batch, heads, length, head_dim)."""


class Twice(nn.Module):
    """One module for text and pictures seen, one for the picture being made: the last positions of a sequence."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.understanding, self.generating = build(), build()

    def forward(self, x: Tensor, num_generated: int) -> Tensor:
        """Each position by its own module; those of the last `num_generated` by the second."""
        cut = x.shape[1] - num_generated
        if num_generated == 0:
            return self.understanding(x)
        if cut == 0:
            return self.generating(x)
        return torch.cat([self.understanding(x[:, :cut]), self.generating(x[:, cut:])], 1)


class MixedLayer(nn.Module):
    """Attention over the whole sequence, then feed-forward, with matrices of each kind of position."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, kv_size = config.hidden_size, config.num_kv_heads * config.head_dim
        self.head_dim, self.groups = config.head_dim, config.num_heads // config.num_kv_heads
        self.input_layernorm = Twice(lambda: RMSNorm(size, config.norm_eps))
        self.q_proj = Twice(lambda: Linear(size, config.num_heads * config.head_dim))
        self.k_proj = Twice(lambda: Linear(size, kv_size))
        self.v_proj = Twice(lambda: Linear(size, kv_size))
        self.o_proj = Twice(lambda: Linear(config.num_heads * config.head_dim, size))
        self.post_attention_layernorm = Twice(lambda: RMSNorm(size, config.norm_eps))
        self.mlp = Twice(lambda: FeedForward(config))

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor,
        num_generated: int,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """One layer over a sequence that continues `past`; keys and values of both in evaluation mode only."""
        normal = self.input_layernorm(x, num_generated)
        query, key, value = (
            proj(normal, num_generated).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, *rotary), rotate(key, *rotary)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        all_keys, all_values = (kv.repeat_interleave(self.groups, 1) for kv in (key, value))
        mixed = F.scaled_dot_product_attention(query, all_keys, all_values, attn_mask=mask)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2), num_generated)
        x = x + self.mlp(self.post_attention_layernorm(x, num_generated), num_generated)
        return x, None if self.training else (key, value)


class MixedDecoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config)
        self.layers = nn.ModuleList(MixedLayer(config) for _ in range(config.num_layers))
        self.norm = Twice(lambda: RMSNorm(config.hidden_size, config.norm_eps))

    def forward(
        self, x: Tensor, positions: Tensor, num_generated: int, cache: Cache | None = None
    ) -> tuple[Tensor, Cache | None]:
        """Vectors (batch, length, hidden) to hidden states; a cache only in evaluation mode.

        Args:
            x: Text, pictures, or both.
            positions: Of each vector (length). It sees those at its own position and before it: the parts of a picture
                share one and see each other, words have one each.
            num_generated: Number of vectors at the end that belong to a picture being made.
            cache: Keys and values of an earlier call, which this one continues.
        """
        rotary = self.rotary_emb(x.shape[1], positions[None])
        mask = _visible(positions, cache[0][0].shape[2] if cache else 0)
        grown: Cache = []
        for index, layer in enumerate(self.layers):
            x, kept = layer(x, rotary, mask, num_generated, cache[index] if cache else None)
            grown.append(kept)
        return self.norm(x, num_generated), None if self.training else grown


def _visible(positions: Tensor, num_before: int) -> Tensor:
    """Which of the cached and the new vectors each new one sees: all cached ones, and none at a later position."""
    among = positions[:, None] >= positions[None, :]
    return torch.cat([among.new_ones(len(positions), num_before), among], 1)


class MixedLanguageModel(nn.Module):
    """The decoder and its output matrix, called one by one: not all hidden states become words."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = MixedDecoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
