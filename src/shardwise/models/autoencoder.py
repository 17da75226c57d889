"""An autoencoder of pictures: pixels to latents and back. The drawing part of `multimodal`, frozen there."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoencoderConfig:
    """The shape of an autoencoder."""

    widths: tuple[int, ...]
    """Channels at each resolution, the finest first; every further one halves height and width."""
    latent_channels: int
    """Channels of the latents."""
    blocks_per_width: int = 2
    """Residual blocks at each resolution."""
    num_channels: int = 3
    """Colours."""
    norm_groups: int = 8
    """Groups of channels that are normalised together."""

    @property
    def shrinks(self) -> int:
        """How many pixels in a row become one latent."""
        return 2 ** (len(self.widths) - 1)


class ResidualBlock(nn.Module):
    """Two convolutions, added to what came in."""

    def __init__(self, width_in: int, width_out: int, norm_groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(norm_groups, width_in), nn.Conv2d(width_in, width_out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(norm_groups, width_out), nn.Conv2d(width_out, width_out, 3, padding=1)
        self.shortcut = nn.Conv2d(width_in, width_out, 1) if width_in != width_out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        hidden = self.conv1(F.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(hidden)))


class Autoencoder(nn.Module):
    """An encoder and a decoder, each entered by its own method."""

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
        """Pictures (batch, colours, height, width) to latents (batch, channels, height / shrinks, width / shrinks)."""
        return self.encoder(pixels)

    def decode(self, latents: Tensor) -> Tensor:
        """And back."""
        return self.decoder(latents)

    def forward(self, pixels: Tensor) -> Tensor:
        """There and back."""
        return self.decode(self.encode(pixels))


def _resolutions(config: AutoencoderConfig, widths: tuple[int, ...], *, down: bool) -> list[nn.Module]:
    """The blocks of every width, with a change of resolution between each two."""
    modules: list[nn.Module] = []
    before = widths[0]
    for index, width in enumerate(widths):
        if index:
            modules.append(nn.Conv2d(before, before, 3, stride=2, padding=1) if down else nn.Upsample(scale_factor=2.0))
        for block in range(config.blocks_per_width):
            modules.append(ResidualBlock(width if block else before, width, config.norm_groups))
        before = width
    return modules
