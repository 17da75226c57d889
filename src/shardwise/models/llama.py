"""Llama 3 as a plain module: the reference for plans, estimates and tests. No sharding, no I/O.

Parameters have the names of the published checkpoints, so that those load without renaming. Every module with
parameters or buffers initializes them in `reset_parameters`, so the model may be built on meta.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.config.schema import PositiveInt, Strict
from shardwise.models.attention import AttentionMask, attend, document_mask

ORIGINAL_LENGTH = 8192
"""Context length of Llama 3 before its rotary wavelengths were scaled."""
_INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig(Strict):
    """The shape of a Llama."""

    hidden_size: PositiveInt
    """Width of the residual stream."""
    intermediate_size: PositiveInt
    """Width inside the feed-forward."""
    num_layers: PositiveInt
    """Number of decoder blocks."""
    num_heads: PositiveInt
    """Number of query heads."""
    num_kv_heads: PositiveInt
    """Number of key and value heads, each shared by `num_heads / num_kv_heads` query heads."""
    vocab_size: PositiveInt = 128_256
    """Number of tokens in the vocabulary."""
    max_sequence_length: PositiveInt = 8192
    """Maximum sequence length of the rotary tables."""
    rope_theta: float = 500_000.0
    """Base of the rotary wavelengths."""
    rope_factor: float = 1.0
    """Factor of long rotary wavelengths, for long contexts (8 in Llama 3.1, 32 in 3.2); 1: unscaled."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Use the token embedding as output matrix."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads


SHAPES: dict[str, LlamaConfig] = {
    "llama3-debug": LlamaConfig(
        hidden_size=64, intermediate_size=192, num_layers=4, num_heads=4, num_kv_heads=2,
        vocab_size=512, max_sequence_length=256,
    ),
    "llama3-bytes": LlamaConfig(  # of the vocabulary: bytes and the end of a document
        hidden_size=128, intermediate_size=384, num_layers=4, num_heads=4, num_kv_heads=4,
        vocab_size=257, max_sequence_length=1024, rope_theta=10_000.0, tie_embeddings=True,
    ),
    "llama3-1b": LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32, num_kv_heads=8,
        rope_factor=32.0, tie_embeddings=True,
    ),
    "llama3-3b": LlamaConfig(
        hidden_size=3072, intermediate_size=8192, num_layers=28, num_heads=24, num_kv_heads=8,
        rope_factor=32.0, tie_embeddings=True,
    ),
    "llama3-8b": LlamaConfig(hidden_size=4096, intermediate_size=14_336, num_layers=32, num_heads=32, num_kv_heads=8),
    "llama3-70b": LlamaConfig(hidden_size=8192, intermediate_size=28_672, num_layers=80, num_heads=64, num_kv_heads=8),
    "llama3-405b": LlamaConfig(
        hidden_size=16_384, intermediate_size=53_248, num_layers=126, num_heads=128, num_kv_heads=8, rope_factor=8.0,
    ),
}  # fmt: skip


class Linear(nn.Linear):
    """A linear layer without bias, with the usual initialization of language models."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weights from a narrow normal distribution."""
        nn.init.normal_(self.weight, std=_INIT_STD)


class Embedding(nn.Embedding):
    """Token embedding with a standard deviation that also suits an output matrix."""

    def reset_parameters(self) -> None:
        """Draw the vectors from a narrow normal distribution."""
        nn.init.normal_(self.weight, std=_INIT_STD)


class RMSNorm(nn.Module):
    """Scale to unit mean square, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the gains to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dim."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Cosine and sine tables: non-persistent buffers, computed by `reset_parameters`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        shape = (config.max_sequence_length, config.head_dim)
        self.register_buffer("cos", torch.empty(shape), persistent=False)
        self.register_buffer("sin", torch.empty(shape), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill both tables."""
        positions = torch.arange(self.config.max_sequence_length, device=self.cos.device)
        angles = torch.outer(positions.float(), _rotary_frequencies(self.config, self.cos.device))
        angles = torch.cat([angles, angles], dim=-1)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, length: int, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The tables' first `length` rows, or those of `position_ids` (batch, length) with a dim for heads."""
        if position_ids is None:
            return self.cos[:length], self.sin[:length]
        return self.cos[position_ids].unsqueeze(1), self.sin[position_ids].unsqueeze(1)


def _rotary_frequencies(config: LlamaConfig, device: torch.device) -> Tensor:
    """Angular frequency of each pair of dims; the slow ones are divided by `rope_factor` (Llama 3.1)."""
    exponents = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_factor == 1.0:
        return frequencies
    low, high = 1.0, 4.0  # fixed for all published models
    turns = ORIGINAL_LENGTH * frequencies / (2 * math.pi)  # within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / config.rope_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of dims (i, i + half) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with grouped key and value heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.head_dim)
        self.k_proj = Linear(config.hidden_size, kv_size)
        self.v_proj = Linear(config.hidden_size, kv_size)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: AttentionMask | None = None) -> Tensor:
        """Causal attention, or with `mask`; (batch, length, hidden) in and out."""
        batch, length, _ = x.shape
        query, key, value = (
            proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = attend(rotate(query, cos, sin), rotate(key, cos, sin), value, mask)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU feed-forward: gate and up projections, and a down projection."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward to each position."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention, then feed-forward, each with pre-norm and residual connection."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: AttentionMask | None = None) -> Tensor:
        """One layer of the residual stream."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, blocks and the final norm."""

    block_class: Callable[[Any], nn.Module] = Block

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config)
        self.layers = nn.ModuleList(self.block_class(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        query_positions: Tensor | None = None,
    ) -> Tensor:
        """Tokens (batch, length) to hidden states (batch, length, hidden)."""
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(input_ids.shape[1], position_ids)
        mask = None if document_ids is None else document_mask(document_ids, x.dtype, query_positions)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)


class Llama(nn.Module):
    """A decoder and its output matrix."""

    decoder_class: Callable[[Any], Decoder] = Decoder
    tensor_plan: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"), "colwise"),
        **dict.fromkeys(("*.o_proj", "*.down_proj"), "rowwise"),
        **dict.fromkeys(("*.input_layernorm", "*.post_attention_layernorm"), "sequence"),
    }
    """Tensor-parallel plan, as in `TensorConfig.plan`; the embedding and the output matrix are sharded by rows."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = self.decoder_class(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        query_positions: Tensor | None = None,
    ) -> Tensor:
        """Tokens (batch, length) to logits (batch, length, vocabulary).

        Args:
            input_ids: The tokens.
            position_ids: Position of each token in its document; None: its position in the sequence.
            document_ids: Document of each token; tokens attend only to their own document.
            query_positions: Positions of `input_ids` in the sequence, if `document_ids` cover the whole sequence but
                the rank has only a part of it (context parallelism).
        """
        return self.lm_head(self.model(input_ids, position_ids, document_ids, query_positions))
