"""From a bounded buffer of stored bytes into a tensor of any device, dtype and strides."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.checkpointing.reading.runs import Slab

_NUM_PINNED = 2  # one is read into while the other is copied to the device


class Buffers:
    """The buffers of one thread, made when first needed and used over and over.

    Args:
        num_bytes: Of each.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._plain: torch.Tensor | None = None
        self._pinned: list[tuple[torch.Tensor, Any]] = []
        self._turn = 0

    def next(self, device: torch.device) -> torch.Tensor:
        """A buffer for bytes on their way to `device`; nothing is using it any more."""
        if device.type != "cuda":
            if self._plain is None:
                self._plain = torch.empty(self._num_bytes, dtype=torch.uint8)
            return self._plain
        if len(self._pinned) < _NUM_PINNED:
            self._pinned.append((torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()))
            self._turn = len(self._pinned) - 1
        else:
            self._turn = (self._turn + 1) % _NUM_PINNED
        buffer, copied = self._pinned[self._turn]
        copied.synchronize()
        return buffer

    def hand_over(self, buffer: torch.Tensor, dtype: torch.dtype, slab: Slab, target: torch.Tensor) -> None:
        """Copy what is wanted of the slab in `buffer` to its place in `target`."""
        stored = buffer[: slab.numel * dtype.itemsize].view(dtype).view(slab.sizes)
        wanted = narrowed(stored, slab.starts, slab.lengths)
        place = narrowed(target, slab.target_starts, slab.lengths)
        if target.device.type != "cuda":
            place.copy_(wanted)
            return
        with torch.cuda.device(target.device):
            if wanted.is_contiguous() and wanted.dtype == place.dtype:
                place.copy_(wanted, non_blocking=True)
            else:  # the device casts and strides far faster than the CPU
                place.copy_(narrowed(stored.to(target.device, non_blocking=True), slab.starts, slab.lengths))
            self._pinned[self._turn][1].record()

    def wait(self) -> None:
        """Return once every copy has arrived."""
        for _, copied in self._pinned:
            copied.synchronize()


def narrowed(tensor: torch.Tensor, starts: tuple[int, ...], lengths: tuple[int, ...]) -> torch.Tensor:
    """The part of `tensor` from `starts` on; `tensor` itself when that is all of it."""
    for dim, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor
