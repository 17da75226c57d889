"""Reference models in the words of transformers' `config.json`, so that it can open their exported weights."""

from __future__ import annotations

from typing import Any

from shardwise.models.llama import ORIGINAL_LENGTH, LlamaConfig
from shardwise.models.moe import MoeConfig


def hugging_face_config(config: Any) -> dict[str, Any] | None:
    """What transformers calls a model of this shape; None: it has no such model.

    Args:
        config: A reference model's.

    Ranks:
        Local.
    """
    if type(config) is LlamaConfig:
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_decoder(config)}
    if type(config) is MoeConfig:
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "sliding_window": None,
            **_decoder(config),
        }
    return None


def _decoder(config: LlamaConfig) -> dict[str, Any]:
    described: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_sequence_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        # Their own defaults name tokens that a small vocabulary does not have.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if config.rope_factor != 1.0:
        described["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL_LENGTH,
        }
    return described
