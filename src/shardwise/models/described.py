"""Reference models in the words of transformers' `config.json`, so that it can open their exported weights."""

from __future__ import annotations

from typing import Any

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
