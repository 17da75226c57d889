"""What a model's config says, and reference models in the words of transformers' `config.json`."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise.models.llama import ORIGINAL_LENGTH, LlamaConfig
from shardwise.models.moe import MoeConfig

_NAMES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_sequence_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "tie_embeddings": "tie_word_embeddings",
    "num_experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
}
"""Fields of a reference model's shape, and what transformers calls them."""
_KINDS: dict[type, dict[str, Any]] = {
    LlamaConfig: {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    MoeConfig: {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None},
}


def hugging_face_config(config: Any) -> dict[str, Any] | None:
    """What transformers calls a model of this shape; None: it has no such model.

    Args:
        config: A reference model's.
    """
    if type(config) not in _KINDS:
        return None
    described = {theirs: getattr(config, ours) for ours, theirs in _NAMES.items() if hasattr(config, ours)}
    # Their own defaults name tokens that a small vocabulary does not have.
    described |= {"hidden_act": "silu", "bos_token_id": None, "eos_token_id": None}
    if config.rope_factor != 1.0:
        described["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL_LENGTH,
        }
    return _KINDS[type(config)] | described


def config_size(model: nn.Module, *names: str) -> int | None:
    """A size in the model's config, or in its language part's, under the first of `names` that is a positive int."""
    config: Any = getattr(model, "config", None)
    for holder in (config, getattr(config, "text_config", None), getattr(config, "language", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def max_length(model: nn.Module) -> int | None:
    """The longest sequence that the model has positions for; None: its config does not say."""
    return config_size(model, "max_sequence_length", "max_position_embeddings", "n_positions")
