"""A model of text and pictures: language model, vision transformer and frozen autoencoder, structured like BAGEL.

A sequence is an input picture, a text, and the noisy latents of a picture to generate. `forward` returns the loss of
the text's next tokens and of the noise in the latents; the other public methods generate pictures. Every matrix of the
language model exists twice, for understanding (text and input pictures) and for generation; in evaluation mode the
language model also takes and returns a key-value cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.config.schema import PositiveInt, Strict
from shardwise.models.llama import Embedding, FeedForward, Linear, LlamaConfig, RMSNorm, RotaryEmbedding, rotate
from shardwise.models.modes import evaluation_mode


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig(Strict):
    """The shape of a vision transformer."""

    image_size: PositiveInt
    """Height and width of a picture, in pixels."""
    patch_size: PositiveInt
    """Height and width of a patch."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    intermediate_size: PositiveInt
    """Width inside the feed-forward."""
    num_layers: PositiveInt
    """Number of blocks."""
    num_heads: PositiveInt
    """Number of attention heads."""
    num_channels: PositiveInt = 3
    """Number of color channels."""

    @property
    def num_patches(self) -> int:
        """Number of patches of one picture."""
        return (self.image_size // self.patch_size) ** 2


class VisionBlock(nn.Module):
    """Attention over all patches, then feed-forward, each with pre-norm and residual connection."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.layer_norm1 = nn.LayerNorm(config.hidden_size)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size)
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """One layer; (batch, patches, hidden) in and out."""
        heads = self.qkv(self.layer_norm1(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.layer_norm2(x)), approximate="tanh"))


class VisionTower(nn.Module):
    """Patch and position embeddings, blocks and the final norm."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.patch_embedding = nn.Linear(config.num_channels * config.patch_size**2, config.hidden_size)
        self.position_embedding = nn.Embedding(config.num_patches, config.hidden_size)
        self.layers = nn.ModuleList(VisionBlock(config) for _ in range(config.num_layers))
        self.post_layernorm = nn.LayerNorm(config.hidden_size)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Pictures (batch, channels, height, width) to (batch, patches, hidden)."""
        patches = F.unfold(pixel_values, self.patch_size, stride=self.patch_size).transpose(1, 2)
        x = self.patch_embedding(patches)
        x = x + self.position_embedding(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x)
        return self.post_layernorm(x)


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoencoderConfig(Strict):
    """The shape of an autoencoder."""

    widths: tuple[PositiveInt, ...]
    """Channels at each resolution, starting with the finest; each further one halves height and width."""
    latent_channels: PositiveInt
    """Number of latent channels."""
    blocks_per_width: PositiveInt = 2
    """Number of residual blocks at each resolution."""
    num_channels: PositiveInt = 3
    """Number of color channels."""
    norm_groups: PositiveInt = 8
    """Number of groups in group normalization."""

    @property
    def shrinks(self) -> int:
        """Ratio of picture height to latent height."""
        return 2 ** (len(self.widths) - 1)


class ResidualBlock(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, width_in: int, width_out: int, norm_groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(norm_groups, width_in), nn.Conv2d(width_in, width_out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(norm_groups, width_out), nn.Conv2d(width_out, width_out, 3, padding=1)
        self.shortcut = nn.Conv2d(width_in, width_out, 1) if width_in != width_out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        hidden = self.conv1(F.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(hidden)))


class Autoencoder(nn.Module):
    """An encoder and a decoder, each with its own method."""

    def __init__(self, config: AutoencoderConfig) -> None:
        super().__init__()
        first, last = config.widths[0], config.widths[-1]
        self.encoder = nn.Sequential(
            nn.Conv2d(config.num_channels, first, 3, padding=1),
            *_resolutions(config, config.widths, down=True),
            nn.Conv2d(last, config.latent_channels, 3, padding=1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(config.latent_channels, last, 3, padding=1),
            *_resolutions(config, config.widths[::-1], down=False),
            nn.Conv2d(first, config.num_channels, 3, padding=1),
        )

    def encode(self, pixels: Tensor) -> Tensor:
        """Pictures (batch, channels, height, width) to latents (batch, channels, height / shrinks, width / shrinks)."""
        return self.encoder(pixels)

    def decode(self, latents: Tensor) -> Tensor:
        """Latents to pictures."""
        return self.decoder(latents)

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode and decode pictures."""
        return self.decode(self.encode(pixels))


def _resolutions(config: AutoencoderConfig, widths: tuple[int, ...], *, down: bool) -> list[nn.Module]:
    """The blocks of every width, with a change of resolution between widths."""
    modules: list[nn.Module] = []
    before = widths[0]
    for index, width in enumerate(widths):
        if index:
            modules.append(nn.Conv2d(before, before, 3, stride=2, padding=1) if down else nn.Upsample(scale_factor=2.0))
        for block in range(config.blocks_per_width):
            modules.append(ResidualBlock(width if block else before, width, config.norm_groups))
        before = width
    return modules


Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of every layer, each (batch, heads, length, head_dim)."""


class Twice(nn.Module):
    """Two modules: one for text and input pictures, one for the generated picture at the end of a sequence."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.understanding, self.generating = build(), build()

    def forward(self, x: Tensor, num_generated: int) -> Tensor:
        """Apply the second module to the last `num_generated` positions and the first to the others."""
        cut = x.shape[1] - num_generated
        if num_generated == 0:
            return self.understanding(x)
        if cut == 0:
            return self.generating(x)
        return torch.cat([self.understanding(x[:, :cut]), self.generating(x[:, cut:])], 1)


class MixedLayer(nn.Module):
    """Attention over the whole sequence, then feed-forward, with separate matrices for the two kinds of positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, kv_size = config.hidden_size, config.num_kv_heads * config.head_dim
        self.head_dim, self.groups = config.head_dim, config.num_heads // config.num_kv_heads
        self.input_layernorm = Twice(lambda: RMSNorm(size, config.norm_eps))
        self.q_proj = Twice(lambda: Linear(size, config.num_heads * config.head_dim))
        self.k_proj = Twice(lambda: Linear(size, kv_size))
        self.v_proj = Twice(lambda: Linear(size, kv_size))
        self.o_proj = Twice(lambda: Linear(config.num_heads * config.head_dim, size))
        self.post_attention_layernorm = Twice(lambda: RMSNorm(size, config.norm_eps))
        self.mlp = Twice(lambda: FeedForward(config))

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor,
        num_generated: int,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Apply the layer to a sequence that continues `past`; also return keys and values in evaluation mode."""
        normal = self.input_layernorm(x, num_generated)
        query, key, value = (
            proj(normal, num_generated).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, *rotary), rotate(key, *rotary)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        all_keys, all_values = (kv.repeat_interleave(self.groups, 1) for kv in (key, value))
        mixed = F.scaled_dot_product_attention(query, all_keys, all_values, attn_mask=mask)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2), num_generated)
        x = x + self.mlp(self.post_attention_layernorm(x, num_generated), num_generated)
        return x, None if self.training else (key, value)


class MixedDecoder(nn.Module):
    """Embedding, layers and the final norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config)
        self.layers = nn.ModuleList(MixedLayer(config) for _ in range(config.num_layers))
        self.norm = Twice(lambda: RMSNorm(config.hidden_size, config.norm_eps))

    def forward(
        self, x: Tensor, positions: Tensor, num_generated: int, cache: Cache | None = None
    ) -> tuple[Tensor, Cache | None]:
        """Embeddings (batch, length, hidden) to hidden states; also returns a cache in evaluation mode.

        An embedding attends to its own and earlier positions: all patches of a picture have the same position, so they
        attend to each other; each token has its own. The last `num_generated` belong to the picture to generate.
        """
        rotary = self.rotary_emb(x.shape[1], positions[None])
        # Each new embedding attends to all cached ones, and to none at a later position.
        among = positions[:, None] >= positions[None, :]
        mask = torch.cat([among.new_ones(len(positions), cache[0][0].shape[2] if cache else 0), among], 1)
        grown: Cache = []
        for index, layer in enumerate(self.layers):
            x, kept = layer(x, rotary, mask, num_generated, cache[index] if cache else None)
            grown.append(kept)
        return self.norm(x, num_generated), None if self.training else grown


class MixedLanguageModel(nn.Module):
    """The decoder and its output matrix, called separately, because not all hidden states predict tokens."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = MixedDecoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class MultimodalConfig(LlamaConfig):
    """The shape of the language model and its encoders."""

    vision_config: VisionConfig
    """Shape of the vision transformer, for input pictures."""
    autoencoder: AutoencoderConfig
    """Shape of the autoencoder, for generated pictures."""
    latent_patch_size: PositiveInt = 2
    """Height and width of a patch of latents, which becomes one embedding."""

    @property
    def latent_grid(self) -> int:
        """Number of latent patches in a row of a generated picture."""
        return self.vision_config.image_size // self.autoencoder.shrinks // self.latent_patch_size

    @property
    def latent_size(self) -> int:
        """Number of values in a latent patch."""
        return self.autoencoder.latent_channels * self.latent_patch_size**2


SHAPES: dict[str, MultimodalConfig] = {
    "multimodal-debug": MultimodalConfig(
        hidden_size=64, intermediate_size=128, num_layers=3, num_heads=4, num_kv_heads=2,
        vocab_size=257, max_sequence_length=256, rope_theta=10_000.0,
        vision_config=VisionConfig(
            image_size=16, patch_size=4, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4,
        ),
        autoencoder=AutoencoderConfig(widths=(8, 16), latent_channels=4, blocks_per_width=1, norm_groups=4),
    ),
    "multimodal-14b": MultimodalConfig(
        hidden_size=3584, intermediate_size=18_944, num_layers=28, num_heads=28, num_kv_heads=4,
        vocab_size=152_064, max_sequence_length=32_768, rope_theta=1_000_000.0,
        vision_config=VisionConfig(
            image_size=448, patch_size=14, hidden_size=1152, intermediate_size=4304, num_layers=26, num_heads=16,
        ),
        autoencoder=AutoencoderConfig(widths=(128, 256, 512, 512), latent_channels=16, norm_groups=32),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Keys and values of the previous text and images, and the next position."""

    cache: Cache | None = None
    position: int = 0


class Multimodal(nn.Module):
    """Model of text, images and image generation."""

    tensor_plan: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("*.q_proj.*", "*.k_proj.*", "*.v_proj.*", "*.gate_proj", "*.up_proj", "*.fc1"), "colwise"),
        **dict.fromkeys(("*.o_proj.*", "*.down_proj", "*.fc2"), "rowwise"),
        "*.qkv": "colwise_gather_output",  # three projections in one
        "*.out_proj": "rowwise_split_input",
    }
    """Tensor-parallel plan, as in `TensorConfig.plan`."""

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
        """Return the loss of the text's next tokens after an input picture, and of the noise in the target's latents.

        `noise` and `times` (the noise level, from 0 to 1) are random if None.
        """
        with torch.no_grad():
            encoded = self.vae_model.encode(target_pixels)
            latents = F.pixel_unshuffle(encoded, self.config.latent_patch_size).flatten(2).transpose(1, 2)
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
        """Append a text (batch, length) to `context`."""
        context = context or Context()
        positions = torch.arange(input_ids.shape[1], device=input_ids.device) + context.position
        with evaluation_mode(self):
            embedded = self.language_model.model.embed_tokens(input_ids)
            _, cache = self.language_model.model(embedded, positions, 0, context.cache)
        return Context(cache=cache, position=context.position + input_ids.shape[1])

    @torch.no_grad()
    def forward_cache_update_vit(self, pixel_values: Tensor, context: Context | None = None) -> Context:
        """Append a picture (batch, channels, height, width) to `context`."""
        context = context or Context()
        with evaluation_mode(self):
            seen = self.connector(self.vit_model(pixel_values))
            positions = torch.full((seen.shape[1],), context.position, device=seen.device)
            _, cache = self.language_model.model(seen, positions, 0, context.cache)
        return Context(cache=cache, position=context.position + 1)

    @torch.no_grad()
    def forward_inference(self, latents: Tensor, times: Tensor, context: Context) -> Tensor:
        """Predict the velocity of noisy latents (batch, patches, size), given `context`."""
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
        """Generate a picture from a text (batch, length) and perhaps a picture; collective if the model is sharded."""
        context = None if pixel_values is None else self.forward_cache_update_vit(pixel_values)
        context = self.forward_cache_update_text(input_ids, context)
        shape = (len(input_ids), self.config.latent_grid**2, self.config.latent_size)
        device = input_ids.device
        latents = torch.randn(shape, generator=generator, device=generator.device if generator else device).to(device)
        for step in range(num_steps):
            times = torch.full((len(input_ids),), 1 - step / num_steps, device=device)
            direction = self.forward_inference(latents, times, context)
            latents = (latents - direction / num_steps).to(direction.dtype)
        grid = (self.config.latent_grid, self.config.latent_grid)
        patches = latents.transpose(1, 2).unflatten(2, grid)
        return self.vae_model.decode(F.pixel_shuffle(patches, self.config.latent_patch_size))

    def _embed_latents(self, latents: Tensor, times: Tensor) -> Tensor:
        """Embed latents with their positions and times (batch), encoded as sines and cosines."""
        place = self.latent_position(torch.arange(latents.shape[1], device=latents.device))
        num_waves = self.config.hidden_size // 2
        exponents = torch.arange(num_waves, device=times.device) / num_waves
        angles = 1000 * times.float()[:, None] * torch.exp(-math.log(10_000.0) * exponents)
        waves = torch.cat([angles.cos(), angles.sin()], -1).to(place.dtype)
        return self.vae2llm(latents.to(place.dtype)) + place + self.time_embedder(waves)[:, None]
