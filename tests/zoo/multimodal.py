"""Models of transformers with two towers: contrastive, and an image tower feeding a language model."""

from typing import Any

import transformers
from torch import Tensor, nn

from tests.zoo.case import Case, normal, tokens

hf: Any = transformers  # its configs take more than their annotations say

TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
VISION = {
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
IMAGE_TOKEN = 3


def clip() -> nn.Module:
    config = hf.CLIPConfig(
        text_config={**TEXT, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
        vision_config=VISION,
        projection_dim=16,
    )
    return hf.CLIPModel(config)


def clip_batch(seed: int) -> dict[str, object]:
    ids = tokens(seed)
    ids[:, -1] = 2
    return {"input_ids": ids, "pixel_values": normal(seed, 2, 3, 16, 16), "return_loss": True}


def siglip() -> nn.Module:
    config = hf.SiglipConfig(
        text_config={**TEXT, "projection_size": 24, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
        vision_config=VISION,
    )
    return hf.SiglipModel(config)


def llava() -> nn.Module:
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**TEXT, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2),
        vision_config=hf.CLIPVisionConfig(**VISION),
        image_token_index=IMAGE_TOKEN,
        image_token_id=IMAGE_TOKEN,
        image_seq_length=4,
        vision_feature_layer=-2,
    )
    return hf.LlavaForConditionalGeneration(config)


def llava_batch(seed: int) -> dict[str, Tensor]:
    ids = tokens(seed)
    ids[:, 1:5] = IMAGE_TOKEN  # (16 / 8) ** 2 patches
    return {"input_ids": ids, "labels": ids.clone(), "pixel_values": normal(seed, 2, 3, 16, 16)}


CASES = [
    Case(name="clip", build=clip, make_batch=clip_batch, four_ranks=True),
    Case(name="llava", build=llava, make_batch=llava_batch, four_ranks=True),
    Case(name="siglip", build=siglip, make_batch=clip_batch, slow=True),
]
