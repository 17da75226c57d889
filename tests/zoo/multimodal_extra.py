"""Further two-tower models of transformers."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from shardwise.config.schema import ShardConfig
from tests.zoo.case import Case, normal, tokens
from tests.zoo.multimodal import TEXT, VISION

hf: Any = transformers  # its configs take more than their annotations say


def blip() -> nn.Module:
    config = hf.BlipConfig(
        text_config={
            **TEXT,
            "encoder_hidden_size": 24,
            "projection_dim": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "sep_token_id": 2,
        },
        vision_config=VISION,
        projection_dim=16,
        image_text_hidden_size=16,
    )
    return hf.BlipForConditionalGeneration(config)


def blip_batch(seed: int) -> dict[str, Tensor]:
    ids = tokens(seed)
    return {"input_ids": ids, "labels": ids.clone(), "pixel_values": normal(seed, 2, 3, 16, 16)}


def pi0() -> nn.Module:
    """A policy whose language tower leaves only its keys and values, in a cache."""
    gemma = {
        "model_type": "gemma",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    vision = {**VISION, "model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4, "vision_use_head": False}
    tower = {"text_config": {**gemma, "vocab_size": 96}, "vision_config": vision, "projection_dim": 32}
    config = hf.PI0Config(
        vlm_config={"model_type": "paligemma", "image_token_id": 95, **tower},
        dit_config=gemma,
        chunk_size=5,
        max_state_dim=6,
        max_action_dim=6,
    )
    return hf.PI0ForConditionalGeneration(config)


def pi0_batch(seed: int) -> dict[str, Tensor]:
    ids = tokens(seed, vocab=90)
    ids[:, :4] = 95
    return {
        "state": normal(seed, 2, 6),
        "noise": normal(seed + 1, 2, 5, 6),
        "actions": normal(seed + 2, 2, 5, 6),
        "timestep": normal(seed + 3, 2).sigmoid(),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": normal(seed, 2, 1, 3, 8, 8),
        "pixel_attention_mask": torch.ones(2, 1, dtype=torch.bool),
    }


def qwen2_vl() -> nn.Module:
    config = hf.Qwen2VLConfig(
        text_config={
            **TEXT,
            "num_key_value_heads": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
        },
        vision_config={
            "depth": 2,
            "embed_dim": 24,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
        },
        image_token_id=3,
        video_token_id=4,
        vision_start_token_id=1,
        vision_end_token_id=2,
    )
    return hf.Qwen2VLForConditionalGeneration(config)


def qwen2_vl_batch(seed: int) -> dict[str, Tensor]:
    ids = tokens(seed, vocab=96).clamp(min=5)
    ids[:, 1] = 1
    ids[:, 2:6] = 3  # a 4 x 4 grid of patches, merged 2 x 2
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "attention_mask": torch.ones_like(ids),
        "pixel_values": normal(seed, 2 * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": (ids == 3).int(),
    }


CASES = [
    Case(name="pi0", build=pi0, make_batch=pi0_batch),
    Case(name="pi0_freed", build=pi0, make_batch=pi0_batch, config=ShardConfig(reshard_after_forward=True), slow=True),
    Case(name="blip", build=blip, make_batch=blip_batch, slow=True),
    Case(name="qwen2_vl", build=qwen2_vl, make_batch=qwen2_vl_batch, slow=True),
]
