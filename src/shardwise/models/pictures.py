"""`captioned_shapes`: generated pictures with captions, for `data.source` of a `multimodal` run. No files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_COLORS = {
    "red": (1.0, -1.0, -1.0),
    "green": (-1.0, 1.0, -1.0),
    "blue": (-1.0, -1.0, 1.0),
    "yellow": (1.0, 1.0, -1.0),
    "white": (1.0, 1.0, 1.0),
}
_SHAPES = ("square", "disc", "ring", "cross")
_PLACES = {"top left": (0.3, 0.3), "top right": (0.3, 0.7), "bottom left": (0.7, 0.3), "bottom right": (0.7, 0.7)}
_END = 256  # end of a caption, as in the byte tokenizer
_CAPTION_LENGTH = 32
_NUM_SAMPLES = 4096


@dataclass(frozen=True, slots=True)
class CaptionedShapes:
    """Indexed samples: an input image, its caption, and the image to generate."""

    image_size: int
    num_samples: int

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return sample `index`, always the same: `input_ids`, `pixel_values` and `target_pixels`."""
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        color, shape, place = (
            names[int(torch.randint(len(names), (), generator=generator))]
            for names in (tuple(_COLORS), _SHAPES, tuple(_PLACES))
        )
        radius = 0.15 + 0.1 * torch.rand((), generator=generator)
        inside = _inside(shape, _PLACES[place], radius, self.image_size)
        drawn = torch.where(inside, torch.tensor(_COLORS[color])[:, None, None], torch.tensor(-1.0))
        seen = drawn + 0.1 * torch.randn(drawn.shape, generator=generator)
        caption = list(f"a {color} {shape}, {place}".encode())
        ids = torch.tensor([*caption, *[_END] * (_CAPTION_LENGTH - len(caption))])
        return {"input_ids": ids, "pixel_values": seen, "target_pixels": drawn}


def captioned_shapes(config: Any = None, *, image_size: int = 16, num_samples: int = _NUM_SAMPLES) -> CaptionedShapes:
    """Return samples for `data.source: shardwise.models.pictures:captioned_shapes`; size 16 fits multimodal-debug."""
    return CaptionedShapes(image_size, num_samples)


def _inside(shape: str, place: tuple[float, float], radius: Tensor, size: int) -> Tensor:
    """Mask (height, width) of the pixels inside the shape."""
    line = (torch.arange(size) + 0.5) / size
    down, right = (line[:, None] - place[0]).abs(), (line[None, :] - place[1]).abs()
    distance = (down**2 + right**2).sqrt()
    match shape:
        case "square":
            return (down < radius) & (right < radius)
        case "disc":
            return distance < radius
        case "ring":
            return (distance < 1.2 * radius) & (distance > 0.6 * radius)
        case _:
            return ((down < radius / 3) & (right < radius)) | ((right < radius / 3) & (down < radius))
