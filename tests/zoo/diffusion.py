"""Models of diffusers: UNets, autoencoders with encode and decode, a diffusion transformer."""

from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from tests.zoo.case import Case, generator, normal

hub: Any = diffusers  # its names may be stand-ins for what is not installed


def unet() -> nn.Module:
    return hub.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
    )


def unet_batch(seed: int) -> dict[str, Tensor]:
    return {
        "sample": normal(seed, 2, 4, 8, 8),
        "timestep": torch.randint(0, 100, (2,), generator=generator(seed)),
        "encoder_hidden_states": normal(seed + 1, 2, 5, 16),
    }


def autoencoder() -> nn.Module:
    return hub.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        sample_size=16,
    )


def autoencoder_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """The usual training step, which never calls the autoencoder itself."""
    latents = model.encode(batch).latent_dist  # pyrefly: ignore[not-callable]
    decoded = model.decode(latents.mode()).sample  # pyrefly: ignore[not-callable]
    return (decoded - batch).square().mean() + 1e-3 * latents.kl().mean()


def diffusion_transformer() -> nn.Module:
    return hub.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=100,
    )


def diffusion_transformer_batch(seed: int) -> dict[str, Tensor]:
    draw = generator(seed)
    return {
        "hidden_states": normal(seed, 2, 4, 8, 8),
        "timestep": torch.randint(0, 100, (2,), generator=draw),
        "class_labels": torch.randint(0, 100, (2,), generator=draw),
    }


def stable_diffusion_3() -> nn.Module:
    return hub.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        out_channels=4,
    )


def stable_diffusion_3_batch(seed: int) -> dict[str, Tensor]:
    return {
        "hidden_states": normal(seed, 2, 4, 8, 8),
        "encoder_hidden_states": normal(seed + 1, 2, 5, 16),
        "pooled_projections": normal(seed + 2, 2, 16),
        "timestep": torch.tensor([3, 50]),
    }


def images(seed: int) -> Tensor:
    return normal(seed, 2, 3, 16, 16)


CASES = [
    Case(name="unet", build=unet, make_batch=unet_batch, four_ranks=True, slow=True),
    Case(name="autoencoder", build=autoencoder, make_batch=images, slow=True),
    Case(
        name="autoencoder_methods",
        build=autoencoder,
        make_batch=images,
        loss=autoencoder_loss,
        runs_again=("",),  # the root is entered by `encode` and again by `decode`
        four_ranks=True,
    ),
    Case(
        name="diffusion_transformer",
        build=diffusion_transformer,
        make_batch=diffusion_transformer_batch,
        runs_again=("transformer_blocks.0.*",),  # the root calls the first block's embedding once more at the end
        slow=True,
    ),
    Case(name="stable_diffusion_3", build=stable_diffusion_3, make_batch=stable_diffusion_3_batch, slow=True),
]
