"""One model that reads, sees and draws: language model, vision transformer and frozen autoencoder (BAGEL's shape).

A sequence is a picture that was seen, a text, and the noisy latents of a picture to draw. `forward` gives the loss of
the text's next words and of the noise in the latents; the other public methods make pictures, step by step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.models.autoencoder import Autoencoder, AutoencoderConfig
from shardwise.models.llama import LlamaConfig
from shardwise.models.mixed_decoder import Cache, MixedLanguageModel
from shardwise.models.modes import evaluation_mode
from shardwise.models.vision import VisionConfig, VisionTower


@dataclass(frozen=True, kw_only=True, slots=True)
class MultimodalConfig(LlamaConfig):
    """The shape of the language model and of what is around it."""

    vision_config: VisionConfig
    """What sees."""
    autoencoder: AutoencoderConfig
    """What turns drawn latents into pixels."""
    latent_patch_size: int = 2
    """Height and width of the latents that make one vector."""

    @property
    def latent_grid(self) -> int:
        """Vectors in a row of a drawn picture."""
        return self.vision_config.image_size // self.autoencoder.shrinks // self.latent_patch_size

    @property
    def latent_size(self) -> int:
        """Numbers in one such vector."""
        return self.autoencoder.latent_channels * self.latent_patch_size**2


SHAPES: dict[str, MultimodalConfig] = {
    "multimodal-debug": MultimodalConfig(
        hidden_size=64,
        intermediate_size=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=257,
        max_sequence_length=256,
        rope_theta=10_000.0,
        vision_config=VisionConfig(
            image_size=16, patch_size=4, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4
        ),
        autoencoder=AutoencoderConfig(widths=(8, 16), latent_channels=4, blocks_per_width=1, norm_groups=4),
    ),
    "multimodal-14b": MultimodalConfig(
        hidden_size=3584,
        intermediate_size=18_944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        vocab_size=152_064,
        max_sequence_length=32_768,
        rope_theta=1_000_000.0,
        vision_config=VisionConfig(
            image_size=448, patch_size=14, hidden_size=1152, intermediate_size=4304, num_layers=26, num_heads=16
        ),
        autoencoder=AutoencoderConfig(widths=(128, 256, 512, 512), latent_channels=16, norm_groups=32),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What was read and seen so far: keys and values, and the position that comes next."""

    cache: Cache | None = None
    position: int = 0


class Multimodal(nn.Module):
    """Reads, sees and draws."""

    def __init__(self, config: MultimodalConfig) -> None:
        super().__init__()
        self.config = config
        self.language_model = MixedLanguageModel(config)
        self.vit_model = VisionTower(config.vision_config)
        self.connector = nn.Sequential(
            nn.Linear(config.vision_config.hidden_size, config.hidden_size),
            nn.GELU(approximate="tanh"),
            nn.Linear(config.hidden_size, config.hidden_size),
        )
        self.vae_model = Autoencoder(config.autoencoder).requires_grad_(False)
        self.vae2llm = nn.Linear(config.latent_size, config.hidden_size)
        self.llm2vae = nn.Linear(config.hidden_size, config.latent_size)
        self.latent_position = nn.Embedding(config.latent_grid**2, config.hidden_size)
        self.time_embedder = nn.Sequential(
            nn.Linear(config.hidden_size, config.hidden_size),
            nn.SiLU(),
            nn.Linear(config.hidden_size, config.hidden_size),
        )

    def forward(
        self,
        input_ids: Tensor,
        pixel_values: Tensor,
        target_pixels: Tensor,
        noise: Tensor | None = None,
        times: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Loss of the text's next words after a picture, and of the noise in the latents of another.

        Args:
            input_ids: The text (batch, length).
            pixel_values: The picture that is seen (batch, colours, height, width).
            target_pixels: The picture to draw, of the same size.
            noise: For the latents (batch, vectors, latent size); drawn here when absent.
            times: How noisy they are, from 0 (not) to 1 (nothing else) (batch); drawn here when absent.
        """
        with torch.no_grad():
            latents = self._in_patches(self.vae_model.encode(target_pixels))
        noise = torch.randn_like(latents) if noise is None else noise.to(latents.dtype)
        times = torch.rand(len(latents), device=latents.device) if times is None else times
        seen = self.connector(self.vit_model(pixel_values))
        text = self.language_model.model.embed_tokens(input_ids)
        mixed = torch.lerp(latents, noise, times.to(latents.dtype)[:, None, None])
        drawn = self._embed_latents(mixed, times)
        num_seen, num_words, num_drawn = seen.shape[1], text.shape[1], drawn.shape[1]
        words = torch.arange(1, num_words + 1, device=text.device)
        positions = torch.cat([words.new_zeros(num_seen), words, words.new_full((num_drawn,), num_words + 1)])
        hidden, _ = self.language_model.model(torch.cat([seen, text, drawn], 1), positions, num_drawn)
        logits = self.language_model.lm_head(hidden[:, num_seen : num_seen + num_words - 1])
        text_loss = F.cross_entropy(logits.flatten(0, 1).float(), input_ids[:, 1:].flatten())
        image_loss = F.mse_loss(self.llm2vae(hidden[:, -num_drawn:]).float(), (noise - latents).float())
        return {"loss": text_loss + image_loss, "text_loss": text_loss, "image_loss": image_loss}

    @torch.no_grad()
    def forward_cache_update_text(self, input_ids: Tensor, context: Context | None = None) -> Context:
        """Read a text (batch, length) after what is in `context`."""
        context = context or Context()
        positions = torch.arange(input_ids.shape[1], device=input_ids.device) + context.position
        with evaluation_mode(self):
            embedded = self.language_model.model.embed_tokens(input_ids)
            _, cache = self.language_model.model(embedded, positions, 0, context.cache)
        return Context(cache=cache, position=context.position + input_ids.shape[1])

    @torch.no_grad()
    def forward_cache_update_vit(self, pixel_values: Tensor, context: Context | None = None) -> Context:
        """See a picture (batch, colours, height, width) after what is in `context`."""
        context = context or Context()
        with evaluation_mode(self):
            seen = self.connector(self.vit_model(pixel_values))
            positions = torch.full((seen.shape[1],), context.position, device=seen.device)
            _, cache = self.language_model.model(seen, positions, 0, context.cache)
        return Context(cache=cache, position=context.position + 1)

    @torch.no_grad()
    def forward_inference(self, latents: Tensor, times: Tensor, context: Context) -> Tensor:
        """The direction in which noisy latents (batch, vectors, size) change with time, given `context`."""
        with evaluation_mode(self):
            drawn = self._embed_latents(latents, times)
            positions = torch.full((drawn.shape[1],), context.position, device=drawn.device)
            hidden, _ = self.language_model.model(drawn, positions, drawn.shape[1], context.cache)
            return self.llm2vae(hidden)

    @torch.no_grad()
    def generate_image(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        *,
        num_steps: int = 10,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw a picture for a text (batch, length), perhaps after seeing one; (batch, colours, height, width).

        Ranks:
            Collective when the model is sharded: the same number of steps on every rank, each for its own text.
        """
        context = None if pixel_values is None else self.forward_cache_update_vit(pixel_values)
        context = self.forward_cache_update_text(input_ids, context)
        shape = (len(input_ids), self.config.latent_grid**2, self.config.latent_size)
        device = input_ids.device
        latents = torch.randn(shape, generator=generator, device=generator.device if generator else device).to(device)
        for step in range(num_steps):
            times = torch.full((len(input_ids),), 1 - step / num_steps, device=device)
            latents = latents - self.forward_inference(latents, times, context) / num_steps
        return self.vae_model.decode(self._from_patches(latents))

    def _embed_latents(self, latents: Tensor, times: Tensor) -> Tensor:
        place = self.latent_position(torch.arange(latents.shape[1], device=latents.device))
        return self.vae2llm(latents) + place + self.time_embedder(_waves(times, self.config.hidden_size))[:, None]

    def _in_patches(self, latents: Tensor) -> Tensor:
        return F.pixel_unshuffle(latents, self.config.latent_patch_size).flatten(2).transpose(1, 2)

    def _from_patches(self, vectors: Tensor) -> Tensor:
        grid = (self.config.latent_grid, self.config.latent_grid)
        return F.pixel_shuffle(vectors.transpose(1, 2).unflatten(2, grid), self.config.latent_patch_size)


def _waves(times: Tensor, size: int) -> Tensor:
    """Times (batch) as sines and cosines of many wavelengths (batch, size)."""
    exponents = torch.arange(size // 2, device=times.device) / (size // 2)
    angles = 1000 * times.float()[:, None] * torch.exp(-math.log(10_000.0) * exponents)
    return torch.cat([angles.cos(), angles.sin()], -1)
