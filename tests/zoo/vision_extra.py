"""Further image models of transformers, each with a layout of its own."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.zoo.case import Case, generator, normal, pixel_batch
from tests.zoo.vision import SIZES

hf: Any = transformers  # its configs take more than their annotations say


def swin() -> nn.Module:
    config = hf.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4, num_labels=4
    )
    return hf.SwinForImageClassification(config)


def convnext() -> nn.Module:
    return hf.ConvNextForImageClassification(
        hf.ConvNextConfig(hidden_sizes=[8, 16], depths=[2, 2], num_stages=2, patch_size=2, num_labels=4)
    )


def segformer() -> nn.Module:
    config = hf.SegformerConfig(
        num_encoder_blocks=2,
        depths=[2, 2],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        num_labels=4,
    )
    return hf.SegformerForSemanticSegmentation(config)


def segmentation_batch(seed: int) -> dict[str, Tensor]:
    return {
        "pixel_values": normal(seed, 2, 3, 16, 16),
        "labels": torch.randint(0, 4, (2, 16, 16), generator=generator(seed + 1)),
    }


def dpt() -> nn.Module:
    config = hf.DPTConfig(
        **SIZES,
        image_size=16,
        patch_size=4,
        backbone_out_indices=[0, 1, 2],
        neck_hidden_sizes=[8, 8, 8],
        reassemble_factors=[2, 1, 0.5],
        fusion_hidden_size=8,
        num_labels=4,
        is_hybrid=False,
    )
    config.backbone_out_indices = [0, 1, 2]
    return hf.DPTForDepthEstimation(config)


def depth_loss(output: Any) -> Tensor:
    return (output.predicted_depth - 1).square().mean()


def beit() -> nn.Module:
    return hf.BeitForImageClassification(hf.BeitConfig(**SIZES, image_size=16, patch_size=4, num_labels=4))


def dinov2() -> nn.Module:
    config = hf.Dinov2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        mlp_ratio=2,
        image_size=16,
        patch_size=4,
        num_labels=4,
    )
    return hf.Dinov2ForImageClassification(config)


def mobilenet() -> nn.Module:
    return hf.MobileNetV2ForImageClassification(
        hf.MobileNetV2Config(depth_multiplier=0.25, num_labels=4, finegrained_output=False)
    )


CASES = [
    Case(name="swin", build=swin, make_batch=pixel_batch(), slow=True),
    Case(name="convnext", build=convnext, make_batch=pixel_batch(), slow=True),
    Case(name="segformer", build=segformer, make_batch=segmentation_batch, slow=True),
    Case(name="dpt", build=dpt, make_batch=pixel_batch(labels=None), loss=depth_loss, slow=True),
    Case(name="beit", build=beit, make_batch=pixel_batch(), slow=True),
    Case(name="dinov2", build=dinov2, make_batch=pixel_batch(), slow=True),
    Case(name="mobilenet", build=mobilenet, make_batch=pixel_batch(size=32), slow=True),
]
