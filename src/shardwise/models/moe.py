"""A mixture of experts based on Llama: in every block each token is routed to several of the feed-forwards.

Parameters have the names of Mixtral's published checkpoints, except for the experts, which are stacked as in
transformers (`experts.gate_up_proj`, `experts.down_proj`); `load_weights` reads both layouts. No operation synchronizes
with the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.config.schema import PositiveInt
from shardwise.models.attention import AttentionMask, document_mask
from shardwise.models.grouped_experts import GroupedExperts, count_tokens
from shardwise.models.llama import Attention, Decoder, Linear, Llama, LlamaConfig, RMSNorm

_BALANCE_WEIGHT = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig(LlamaConfig):
    """The shape of a mixture of experts."""

    num_experts: PositiveInt = 8
    """Number of experts in a block."""
    experts_per_token: PositiveInt = 2
    """Number of experts per token."""
    bias_rate: float = 0.0
    """Step size of `ExpertBias`, which balances the load of experts without a loss (DeepSeek-V3: 0.001). 0: no bias."""


SHAPES: dict[str, MoeConfig] = {
    "moe-debug": MoeConfig(
        hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2,
        vocab_size=512, max_sequence_length=256, rope_theta=10_000.0, num_experts=4,
    ),
    "moe-3b-a1b": MoeConfig(  # 3.2B parameters, 1.1B active per token
        hidden_size=2048, intermediate_size=896, num_layers=16, num_heads=16, num_kv_heads=4,
        tie_embeddings=True, num_experts=32, experts_per_token=8,
    ),
    "moe-8x7b": MoeConfig(
        hidden_size=4096, intermediate_size=14_336, num_layers=32, num_heads=32, num_kv_heads=8,
        vocab_size=32_000, max_sequence_length=32_768, rope_theta=1_000_000.0,
    ),
}  # fmt: skip


class RoutedFeedForward(nn.Module):
    """A gate that chooses experts for each token, and the experts."""

    expert_bias: Tensor
    token_counts: Tensor

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.experts_per_token, self.bias_rate = config.experts_per_token, config.bias_rate
        self.gate = Linear(config.hidden_size, config.num_experts)
        self.experts = GroupedExperts(config.num_experts, config.hidden_size, config.intermediate_size)
        if self.bias_rate:
            self.register_buffer("expert_bias", torch.empty(config.num_experts))
            self.register_buffer("token_counts", torch.empty(config.num_experts, dtype=torch.int64), persistent=False)
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the biases and the token counts to zero."""
        if self.bias_rate:
            nn.init.zeros_(self.expert_bias)
            nn.init.zeros_(self.token_counts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted outputs of the experts, and the load balance (1: even)."""
        tokens = x.flatten(0, 1)
        probabilities = self.gate(tokens).softmax(-1, dtype=torch.float32)
        preferred = probabilities + self.expert_bias if self.bias_rate else probabilities
        chosen = preferred.topk(self.experts_per_token, -1).indices
        weights = probabilities.gather(-1, chosen)
        mixed = self.experts(tokens, chosen, weights / weights.sum(-1, keepdim=True))
        counts = count_tokens(chosen, probabilities.shape[-1])
        if self.bias_rate and self.training:
            self.token_counts.add_(counts)
        balance = counts.numel() * (counts / counts.sum() * probabilities.mean(0)).sum()
        return mixed.view_as(x), balance


class ExpertBias:
    """Balances the load of experts without a loss, by a bias that affects only the choice of experts.

    After each optimizer step the bias of an expert with fewer tokens than the mean increases by `bias_rate`; with more
    tokens it decreases. The biases are buffers, on every rank and in checkpoints. `groups` are the process groups
    of ranks with different tokens, one for each mesh axis.
    """

    def __init__(self, model: nn.Module, groups: Sequence[dist.ProcessGroup] = ()) -> None:
        self.layers = [each for each in model.modules() if isinstance(each, RoutedFeedForward) and each.bias_rate]
        self._groups = groups

    @torch.no_grad()
    def update(self, *readings: Tensor) -> None:
        """Update the biases by the tokens counted since the last call; collective if a layer has a bias.

        They do not change if one of the readings, such as the loss of the step, is not finite.
        """
        if not self.layers:
            return
        counts = torch.stack([layer.token_counts for layer in self.layers])
        for group in self._groups:
            dist.all_reduce(counts, group=group)
        directions = torch.sign(counts.to(torch.float32).mean(-1, keepdim=True) - counts)
        for reading in readings:  # on the device, without synchronization
            directions *= torch.isfinite(reading.detach())
        for layer, direction in zip(self.layers, directions, strict=True):
            layer.expert_bias += layer.bias_rate * direction
            layer.token_counts.zero_()


class MoeBlock(nn.Module):
    """Attention, then routed feed-forward, each with pre-norm and residual connection."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.block_sparse_moe = RoutedFeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: AttentionMask | None = None) -> tuple[Tensor, Tensor]:
        """One layer of the residual stream, and its balance."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        mixed, balance = self.block_sparse_moe(self.post_attention_layernorm(x))
        return x + mixed, balance


class MoeDecoder(Decoder):
    """Llama's decoder over blocks that also return their balance."""

    block_class = MoeBlock

    def forward(  # pyrefly: ignore[bad-override]
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        query_positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Tokens (batch, length) to hidden states (batch, length, hidden), and the blocks' mean balance."""
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(input_ids.shape[1], position_ids)
        mask = None if document_ids is None else document_mask(document_ids, x.dtype, query_positions)
        balances = []
        for layer in self.layers:
            x, balance = layer(x, cos, sin, mask)
            balances.append(balance)
        return self.norm(x), torch.stack(balances).mean()


class Moe(Llama):
    """A decoder with experts, and its output matrix."""

    decoder_class = MoeDecoder
    published_experts: ClassVar = {"gate_up_proj": ("w1.weight", "w3.weight"), "down_proj": ("w2.weight",)}
    """Names in Mixtral's published files of the parts of each stacked parameter, under `experts.<number>`."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config)

    def forward(  # pyrefly: ignore[bad-override]
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        query_positions: Tensor | None = None,
        *,
        with_balance: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Tokens (batch, length) to logits (batch, length, vocabulary); see `Llama.forward`.

        With `with_balance` also returns the load balance: 1 if tokens are spread evenly over the experts, the number of
        experts if one gets all tokens.
        """
        hidden, balance = self.model(input_ids, position_ids, document_ids, query_positions)
        logits = self.lm_head(hidden)
        return (logits, balance) if with_balance else logits


def next_token_and_balance(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A `training.objective`: next-token loss plus 0.01 times the balance, and the number of tokens."""
    inputs = {name: batch[name] for name in ("input_ids", "position_ids", "document_ids") if name in batch}
    logits, balance = model(**inputs, with_balance=True)
    labels = batch["labels"].flatten()
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels, ignore_index=-100, reduction="sum")
    num_tokens = (labels != -100).sum()
    return loss + _BALANCE_WEIGHT * balance * num_tokens, num_tokens
