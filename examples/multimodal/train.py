"""A unified model in the manner of BAGEL: language, vision and a frozen autoencoder, with many entry points.

- Training calls the model; sampling calls `generate_image`, which never calls the root's `forward`.
- Language layers choose between methods inside `forward`, and the methods are registered as entry points as
  well: parameters are gathered once all the same.
- The autoencoder is frozen and reached through `encode` and `decode` only.
- In each step a rank has texts, pictures, or both. `guard(model, repair=...)` names what ranks may skip: it is gathered
  and reduced on all of them, with zeros from those that skip it.

    torchrun --nproc-per-node 2 examples/multimodal/train.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention

import shardwise as sw

WIDTH, VOCABULARY, NUM_LAYERS, NUM_LATENTS = 64, 96, 3, 16


def feed_forward() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class LanguageLayer(nn.Module):
    """`forward` only dispatches; text and image tokens have experts of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.projections, self.output = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.understand, self.generate = feed_forward(), feed_forward()

    def forward(self, x: Tensor, is_image: Tensor) -> Tensor:
        return self.forward_train(x, is_image) if self.training else self.forward_inference(x, is_image)

    def forward_train(self, x: Tensor, is_image: Tensor) -> Tensor:
        query, key, value = self.projections(self.norm(x)).chunk(3, -1)
        x = x + self.output(scaled_dot_product_attention(query, key, value))
        update = torch.zeros_like(x)
        update[~is_image] = self.understand(x[~is_image])
        update[is_image] = self.generate(x[is_image])
        return x + update

    def forward_inference(self, x: Tensor, is_image: Tensor) -> Tensor:
        return self.forward_train(x, is_image)


class VisionTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(48, WIDTH)
        self.blocks = nn.ModuleList(feed_forward() for _ in range(2))

    def forward(self, patches: Tensor) -> Tensor:
        x = self.patches(patches)
        for block in self.blocks:
            x = x + block(x)
        return x


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 2, stride=2), nn.ConvTranspose2d(4, 3, 2, stride=2)

    def encode(self, images: Tensor) -> Tensor:
        return self.down(images).flatten(2).transpose(1, 2)

    def decode(self, latents: Tensor) -> Tensor:
        return self.up(latents.transpose(1, 2).unflatten(-1, (4, 4)))


class Unified(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layers = nn.ModuleList(LanguageLayer() for _ in range(NUM_LAYERS))
        self.vision, self.connector = VisionTower(), nn.Linear(WIDTH, WIDTH)
        self.autoencoder = Autoencoder().requires_grad_(False)
        self.from_latents, self.to_latents = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, text: Tensor | None, images: Tensor | None) -> Tensor:
        """Loss of repeating the text, of rebuilding the images' latents, or of both."""
        understood: list[Tensor] = []
        latents = generated = None
        if text is not None:
            understood.append(self.embedding(text))
        if images is not None:
            with torch.no_grad():
                latents = self.autoencoder.encode(images)
            patches = images.unfold(2, 4, 4).unfold(3, 4, 4).flatten(2, 3).transpose(1, 2).flatten(2)
            understood.append(self.connector(self.vision(patches)))
            generated = self.from_latents(latents)
        hidden = self.run_layers(understood, generated)
        losses = []
        if text is not None:
            losses.append(cross_entropy(self.head(hidden[:, : text.shape[1]]).flatten(0, 1), text.flatten()))
        if latents is not None:
            losses.append(mse_loss(self.to_latents(hidden[:, -NUM_LATENTS:]), latents))
        return torch.stack(losses).sum()

    def run_layers(self, understood: list[Tensor], generated: Tensor | None) -> Tensor:
        x = torch.cat(understood if generated is None else [*understood, generated], 1)
        is_image = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        if generated is not None:
            is_image[:, -generated.shape[1] :] = True
        for layer in self.layers:
            x = layer(x, is_image)
        return x

    @torch.no_grad()
    def generate_image(self, text: Tensor) -> Tensor:
        """Draw for a text; enters the model beside `forward`."""
        blank = torch.zeros(text.shape[0], NUM_LATENTS, 4, device=text.device)
        hidden = self.run_layers([self.embedding(text)], self.from_latents(blank))
        return self.autoencoder.decode(self.to_latents(hidden[:, -NUM_LATENTS:]))


CONFIG = sw.ShardConfig(entry_points=tuple(f"layers.{index}:forward_train" for index in range(NUM_LAYERS)))


KINDS = (("text",), ("images",), ("text", "images"))


def make_batch(generator: torch.Generator, kinds: tuple[str, ...]) -> tuple[Tensor | None, Tensor | None]:
    """Texts and pictures, of which a rank may have one kind only."""
    text = torch.randint(0, VOCABULARY, (4, 6), generator=generator)
    images = torch.randn(4, 3, 8, 8, generator=generator)
    return text if "text" in kinds else None, images if "images" in kinds else None


def main(num_steps: int = 20) -> list[float]:
    """Train; return the losses of this rank."""
    mesh = sw.init_distributed()
    torch.manual_seed(0)
    model = Unified()
    plan = sw.plan(model, CONFIG, mesh=mesh)
    sw.shard(model, mesh=mesh, plan=plan)
    sw.guard(model, repair=["vision"])
    if dist.get_rank() == 0:
        print(plan)

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses: list[float] = []
    for step in range(num_steps):
        kinds = KINDS[(step + dist.get_rank()) % len(KINDS)]  # others on each rank
        text, images = sw.cast_inputs(make_batch(generator, kinds), device=mesh.device_type)
        loss = model(text, images)
        loss.backward()
        sw.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:  # look at a sample in the middle of training
            model.eval()
            words = torch.arange(6, device=mesh.device_type).expand(4, -1)
            assert model.generate_image(words).shape == (4, 3, 8, 8)
            model.train()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step:2} loss {losses[-1]:.4f} ({' and '.join(kinds)})")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
