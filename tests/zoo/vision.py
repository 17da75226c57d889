"""Image models of transformers: transformers over patches, convolutions with batch statistics, dense prediction."""

import transformers as hf
from torch import nn

from tests.zoo.case import Case, pixel_batch

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)


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
