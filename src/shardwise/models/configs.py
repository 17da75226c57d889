"""Reading model configs: sizes, transformers' `config.json`, and a random batch for a model."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
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
"""Fields of a reference model's shape, and their names in transformers."""
_KINDS: dict[type, dict[str, Any]] = {
    LlamaConfig: {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    MoeConfig: {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None},
}


def hugging_face_config(config: Any) -> dict[str, Any] | None:
    """Return transformers' config of a reference model of this shape; None if transformers has no such model."""
    if type(config) not in _KINDS or getattr(config, "bias_rate", 0.0):  # Mixtral has no biases
        return None
    described = {theirs: getattr(config, ours) for ours, theirs in _NAMES.items() if hasattr(config, ours)}
    # The default token ids may exceed a small vocabulary.
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
    """A size in the config of the model or its language model: the first of `names` that is a positive int."""
    config: Any = getattr(model, "config", None)
    for holder in (config, getattr(config, "text_config", None), getattr(config, "language", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def max_length(model: nn.Module) -> int | None:
    """The model's maximum sequence length; None if its config has none."""
    return config_size(model, "max_sequence_length", "max_position_embeddings", "n_positions")


def tied_by_config(model: nn.Module) -> list[tuple[str, str]]:
    """The names of input and output embeddings, if a transformers model ties them."""
    config = getattr(model, "config", None)
    getters: list[Any] = [getattr(model, f"get_{end}_embeddings", None) for end in ("input", "output")]
    if not getattr(config, "tie_word_embeddings", False) or not all(getters):
        return []
    try:
        ends = [get() for get in getters]
    except (NotImplementedError, AttributeError):
        return []
    names = {id(module): name for name, module in model.named_modules()}
    found = [f"{names[id(end)]}.weight" for end in ends if id(end) in names and hasattr(end, "weight")]
    return [(found[0], found[1])] if len(found) == 2 else []


def make_batch(model: nn.Module, *, generator: torch.Generator, batch_size: int = 2, sequence_length: int = 16) -> Any:
    """Random tokens or pixels for `model`, as keyword arguments, or as a tensor if its forward takes `tokens`.

    Raises a ConfigError if the model's forward takes neither `tokens` nor `input_ids` nor `pixel_values`.
    """
    names = list(inspect.signature(model.forward).parameters)
    shape = (batch_size, sequence_length)
    if names[:1] == ["tokens"]:
        return _tokens(model, shape, generator)
    batch: dict[str, Tensor] = {}
    if "input_ids" in names:
        batch["input_ids"] = _tokens(model, shape, generator)
        if "decoder_input_ids" in names:
            batch["decoder_input_ids"] = _tokens(model, shape, generator)
    if "pixel_values" in names and (not batch or hasattr(getattr(model, "config", None), "vision_config")):
        batch["pixel_values"] = _pixels(model, batch_size, generator)
    if "target_pixels" in names:
        batch["target_pixels"] = _pixels(model, batch_size, generator)
    if not batch:
        raise ConfigError(
            f"no random batch can be generated for {type(model).__name__}",
            where=f"{type(model).__name__}.forward({', '.join(names)})",
            why="only tokens, input_ids, pixel_values are supported",
            fix="pass a function: --batch module:callable",
        )
    return batch


def _tokens(model: nn.Module, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    vocab_size = config_size(model, "vocab_size")
    if vocab_size is None:
        raise _missing(model, "vocab_size")
    return torch.randint(0, vocab_size, shape, generator=generator)


def _pixels(model: nn.Module, batch_size: int, generator: torch.Generator) -> Tensor:
    config = getattr(model, "config", None)
    config = getattr(config, "vision_config", None) or config
    size = getattr(config, "image_size", None)
    if size is None:
        raise _missing(model, "image_size")
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(batch_size, getattr(config, "num_channels", 3), height, width, generator=generator)


def _missing(model: nn.Module, name: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} has no config.{name}",
        where=type(model).__name__,
        why="the batch's values and shape depend on it",
        fix="pass a function: --batch module:callable",
    )
