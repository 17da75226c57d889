"""What a writer must know of a tensor before its bytes come. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.checkpointing.contents import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor that will be written."""

    name: str
    dtype: str
    """As in `float32`."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]
