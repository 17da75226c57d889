"""`captioned_shapes`: drawn pictures with their captions, for `data.source` of a `multimodal` run. No files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_COLOURS = {
    "red": (1.0, -1.0, -1.0),
    "green": (-1.0, 1.0, -1.0),
    "blue": (-1.0, -1.0, 1.0),
    "yellow": (1.0, 1.0, -1.0),
    "white": (1.0, 1.0, 1.0),
}
_SHAPES = ("square", "disc", "ring", "cross")
_PLACES = {"top left": (0.3, 0.3), "top right": (0.3, 0.7), "bottom left": (0.7, 0.3), "bottom right": (0.7, 0.7)}
_END = 256  # after a caption's bytes, as the byte tokenizer has it
_CAPTION_LENGTH = 32
_NUM_SAMPLES = 4096


@dataclass(frozen=True, slots=True)
class CaptionedShapes:
    """Numbered samples: a picture to see, its caption, and the picture to draw for it."""

    image_size: int
    num_samples: int

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Sample `index`, always the same: `input_ids`, `pixel_values` and `target_pixels`."""
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        colour, shape, place = (
            names[int(torch.randint(len(names), (), generator=generator))]
            for names in (tuple(_COLOURS), _SHAPES, tuple(_PLACES))
        )
        radius = 0.15 + 0.1 * torch.rand((), generator=generator)
        inside = _inside(shape, _PLACES[place], radius, self.image_size)
        drawn = torch.where(inside, torch.tensor(_COLOURS[colour])[:, None, None], torch.tensor(-1.0))
        seen = drawn + 0.1 * torch.randn(drawn.shape, generator=generator)
        caption = list(f"a {colour} {shape}, {place}".encode())
        ids = torch.tensor([*caption, *[_END] * (_CAPTION_LENGTH - len(caption))])
        return {"input_ids": ids, "pixel_values": seen, "target_pixels": drawn}


def captioned_shapes(config: Any = None, *, image_size: int = 16, num_samples: int = _NUM_SAMPLES) -> CaptionedShapes:
    """What `data.source: shardwise.models.pictures:captioned_shapes` means; size 16 fits multimodal-debug."""
    return CaptionedShapes(image_size, num_samples)


def _inside(shape: str, place: tuple[float, float], radius: Tensor, size: int) -> Tensor:
    """Which pixels (height, width) the shape covers."""
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
