"""A unified model: language layers that dispatch by mode, a vision tower, an autoencoder, many methods."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.config.schema import ShardConfig
from tests.zoo.case import Case, normal, tokens

DIM = 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.forward_train(x)
        return self.forward_inference(x)

    def forward_train(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        return self.out(functional.scaled_dot_product_attention(query, key, value))

    def forward_inference(self, x: Tensor) -> Tensor:
        return self.forward_train(x)


class DecoderLayer(nn.Module):
    """As in BAGEL: `forward` only chooses between two methods, which other code could also call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.mlp_generation = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        if self.training:
            return self.forward_train(*args, **kwargs)  # pyrefly: ignore
        return self.forward_inference(*args, **kwargs)  # pyrefly: ignore

    def forward_train(self, x: Tensor, generated: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        hidden = self.norm2(x)
        update = torch.zeros_like(x)
        update[~generated] = self.mlp(hidden[~generated])
        update[generated] = self.mlp_generation(hidden[generated])
        return x + update

    def forward_inference(self, x: Tensor, generated: Tensor) -> Tensor:
        return self.forward_train(x, generated)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(96, DIM)
        self.layers = nn.ModuleList([DecoderLayer() for _ in range(3)])
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor, generated: Tensor) -> Tensor:
        if self.training:
            return self.forward_train(x, generated)
        return self.forward_inference(x, generated)

    def forward_train(self, x: Tensor, generated: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, generated)
        return self.norm(x)

    def forward_inference(self, x: Tensor, generated: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, generated)
        return self.norm(x)


class CausalLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = LanguageModel()
        self.lm_head = nn.Linear(DIM, 96, bias=False)

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        return self.model(*args, **kwargs)


class VisionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class VisionTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(12, DIM)
        self.blocks = nn.ModuleList([VisionBlock() for _ in range(2)])

    def forward(self, patches: Tensor) -> Tensor:
        x = self.patch(patches)
        for block in self.blocks:
            x = block(x)
        return x


class Autoencoder(nn.Module):
    """Frozen in training; reached through `encode` and `decode` only."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 2, 2), nn.SiLU(), nn.Conv2d(8, 4, 1))
        self.up = nn.Sequential(nn.Conv2d(4, 8, 1), nn.SiLU(), nn.ConvTranspose2d(8, 3, 2, 2))

    def encode(self, images: Tensor) -> Tensor:
        return self.down(images)

    def decode(self, latents: Tensor) -> Tensor:
        return self.up(latents)

    def forward(self, images: Tensor) -> Tensor:
        return self.decode(self.encode(images))


class Bagel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.language_model = CausalLanguageModel()
        self.vit_model = VisionTower()
        self.connector = nn.Linear(DIM, DIM)
        self.vae2llm, self.llm2vae = nn.Linear(4, DIM), nn.Linear(DIM, 4)
        self.vae = Autoencoder()
        self.vae.requires_grad_(False)

    def forward(self, ids: Tensor, images: Tensor, patches: Tensor) -> dict[str, Tensor]:
        """Text, seen image and image to make in one sequence; a loss on text and one on latents."""
        with torch.no_grad():
            latents = self.vae.encode(images).flatten(2).transpose(1, 2)
        text = self.language_model.model.embed_tokens(ids)
        seen = self.connector(self.vit_model(patches))
        sequence = torch.cat([text, seen, self.vae2llm(latents)], 1)
        generated = torch.zeros(sequence.shape[:2], dtype=torch.bool, device=ids.device)
        generated[:, -latents.shape[1] :] = True
        hidden = self.language_model(sequence, generated)
        logits = self.language_model.lm_head(hidden[:, : ids.shape[1]])
        noise = self.llm2vae(hidden[:, -latents.shape[1] :])
        return {
            "ce": functional.cross_entropy(logits.flatten(0, 1), ids.flatten()),
            "mse": functional.mse_loss(noise, latents),
        }

    def forward_cache_update_text(self, ids: Tensor) -> Tensor:
        embedded = self.language_model.model.embed_tokens(ids)
        return self.language_model(embedded, torch.zeros(ids.shape, dtype=torch.bool, device=ids.device))

    @torch.no_grad()
    def generate_image(self, ids: Tensor) -> Tensor:
        hidden = self.forward_cache_update_text(ids)
        latents = self.llm2vae(hidden[:, :4]).transpose(1, 2).reshape(-1, 4, 2, 2)
        return self.vae.decode(latents)


def bagel_batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    return tokens(seed, length=4), normal(seed, 2, 3, 8, 8), normal(seed + 1, 2, 3, 12)


def bagel_loss(output: dict[str, Tensor]) -> Tensor:
    return output["ce"] + output["mse"]


def cache_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Trains through a method, draws a picture in between, and never calls the root itself."""
    model.generate_image(batch[0])  # pyrefly: ignore[not-callable]
    return model.forward_cache_update_text(batch[0]).square().mean()  # pyrefly: ignore[not-callable]


def mixed_entries_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Generation before and after the forward of one step, as when samples are logged."""
    model.generate_image(batch[0])  # pyrefly: ignore[not-callable]
    loss = bagel_loss(model(*batch))
    model.generate_image(batch[0])  # pyrefly: ignore[not-callable]
    return loss


REGISTERED = ShardConfig(
    entry_points=(
        *tuple(f"language_model.model.layers.{i}:forward_train" for i in range(3)),
        "language_model.model:forward_train",
        ":generate_image",
        ":forward_cache_update_text",
    )
)

CASES = [
    Case(name="bagel", build=Bagel, make_batch=bagel_batch, loss=bagel_loss, four_ranks=True),
    Case(
        name="bagel_registered",
        build=Bagel,
        make_batch=bagel_batch,
        loss=bagel_loss,
        config=REGISTERED,
        four_ranks=True,
    ),
    Case(name="bagel_method", build=Bagel, make_batch=bagel_batch, loss=cache_loss, runs_again=("**",)),
    Case(name="bagel_samples", build=Bagel, make_batch=bagel_batch, loss=mixed_entries_loss, runs_again=("**",)),
]
