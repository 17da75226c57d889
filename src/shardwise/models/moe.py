"""A mixture of experts in Llama's shape: every block's feed-forward is one of several, chosen token by token.

Parameters carry the names of Mixtral's published checkpoints. An expert without a token on a rank is not run there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.models.llama import Attention, Decoder, Linear, Llama, LlamaConfig, RMSNorm, document_mask

_BALANCE_WEIGHT = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig(LlamaConfig):
    """The shape of a mixture of experts."""

    num_experts: int = 8
    """Feed-forwards in a block."""
    experts_per_token: int = 2
    """How many of them a token passes."""


SHAPES: dict[str, MoeConfig] = {
    "moe-debug": MoeConfig(
        hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2,
        vocab_size=512, max_sequence_length=256, rope_theta=10_000.0, num_experts=4,
    ),
    "moe-8x7b": MoeConfig(
        hidden_size=4096, intermediate_size=14_336, num_layers=32, num_heads=32, num_kv_heads=8,
        vocab_size=32_000, max_sequence_length=32_768, rope_theta=1_000_000.0,
    ),
}  # fmt: skip


class Expert(nn.Module):
    """SwiGLU, by the names that Mixtral gives its matrices."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.w1 = Linear(config.hidden_size, config.intermediate_size)
        self.w2 = Linear(config.intermediate_size, config.hidden_size)
        self.w3 = Linear(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        """Work on each token alone."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class RoutedFeedForward(nn.Module):
    """A gate that chooses experts for each token, and the experts."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.gate = Linear(config.hidden_size, config.num_experts)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts' weighted outputs, and how far from evenly the tokens were spread (1: evenly)."""
        tokens = x.flatten(0, 1)
        probabilities = self.gate(tokens).softmax(-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.experts_per_token, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        # Sorted by expert, so that the sizes of all experts' shares reach the host in one copy.
        order = chosen.flatten().argsort(stable=True)
        share = F.one_hot(chosen, len(self.experts)).sum((0, 1))
        mixed = torch.zeros_like(tokens)
        for expert, places in zip(self.experts, order.split(share.tolist()), strict=True):
            if places.numel() == 0:
                continue
            rows = places // self.experts_per_token
            mixed = mixed.index_add(0, rows, expert(tokens[rows]) * weights.flatten()[places, None])
        balance = len(self.experts) * (share / share.sum() * probabilities.mean(0)).sum()
        return mixed.view_as(x), balance


class MoeBlock(nn.Module):
    """Attention, then routed feed-forward, each normalised before and added after."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.block_sparse_moe = RoutedFeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One layer of the residual stream, and its balance."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        mixed, balance = self.block_sparse_moe(self.post_attention_layernorm(x))
        return x + mixed, balance


class MoeDecoder(Decoder):
    """Llama's decoder over blocks that also tell their balance."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config, MoeBlock)

    def forward(  # pyrefly: ignore[bad-override]
        self, input_ids: Tensor, position_ids: Tensor | None = None, document_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens (batch, length) to hidden states (batch, length, hidden), and the blocks' mean balance."""
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(input_ids.shape[1], position_ids)
        mask = None if document_ids is None else document_mask(document_ids, x.dtype)
        balances = []
        for layer in self.layers:
            x, balance = layer(x, cos, sin, mask)
            balances.append(balance)
        return self.norm(x), torch.stack(balances).mean()


class Moe(Llama):
    """A decoder with experts, and its output matrix."""

    decoder_class = MoeDecoder

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config)

    def forward(  # pyrefly: ignore[bad-override]
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        with_balance: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Tokens (batch, length) to logits (batch, length, vocabulary); see `Llama.forward`.

        Args:
            input_ids: The tokens.
            position_ids: Of each token in its document.
            document_ids: Which document each token belongs to.
            with_balance: Return the balance too: 1 where experts share the tokens evenly, the number of experts where
                one has them all.
        """
        hidden, balance = self.model(input_ids, position_ids, document_ids)
        logits = self.lm_head(hidden)
        return (logits, balance) if with_balance else logits


def next_token_and_balance(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Loss of the next tokens with one hundredth of the balance: `training.objective` of a run that uses all experts.

    Returns:
        The loss summed over the tokens that are learnt, and their number.

    Ranks:
        Collective when the model is sharded.
    """
    inputs = {name: batch[name] for name in ("input_ids", "position_ids", "document_ids") if name in batch}
    logits, balance = model(**inputs, with_balance=True)
    labels = batch["labels"].flatten()
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels, ignore_index=-100, reduction="sum")
    num_tokens = (labels != -100).sum()
    return loss + _BALANCE_WEIGHT * balance * num_tokens, num_tokens
