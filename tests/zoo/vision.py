"""Image models of transformers: one over patches, one of convolutions with batch statistics."""

from typing import Any

import transformers
from torch import nn

from tests.zoo.case import Case, pixel_batch

hf: Any = transformers  # its configs take more than their annotations say

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}


def vit() -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(**SIZES, image_size=16, patch_size=4, num_labels=4))


def resnet() -> nn.Module:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=4)
    return hf.ResNetForImageClassification(config)


CASES = [
    Case(name="vit", build=vit, make_batch=pixel_batch(), four_ranks=True),
    Case(
        name="resnet",
        build=resnet,
        make_batch=pixel_batch(size=32),
        blocks=("resnet.encoder.stages.*.layers.*",),
        four_ranks=True,
    ),
]
