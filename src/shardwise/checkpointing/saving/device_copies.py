"""A second copy of GPU memory on the same GPU, where there is room for it: made in milliseconds.

Over the bus to the host a copy takes longer than a short step, and the optimizer would have to wait for it. A copy on
the GPU itself is some fifty times as fast; the host's copy is then made from it at leisure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.checkpointing.saving.arena import ALIGNMENT

_MARGIN_BYTES = 4 << 30  # left to libraries that take memory from the driver themselves


class DeviceCopies:
    """Copies of tensors that lie as they will lie in the arena, in memory that `release` gives back to the driver.

    Args:
        tensors: All on one GPU. The copies are queued on its current stream.
        offsets: Where each will lie in the arena.

    Ranks:
        Local.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
        device = tensors[0].device
        # A pool of its own: training's cache neither grows by it nor is cut up.
        self._pool: Any = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._pool, device):
            memory = torch.empty(sum(map(_room, tensors)), dtype=torch.uint8, device=device)
        self._runs: list[tuple[int, torch.Tensor]] = []
        by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        start = end = 0  # of the run, in `memory`
        first = 0  # of the run, in the arena
        for offset, tensor in sorted(zip(offsets, tensors, strict=True), key=lambda pair: pair[0]):
            if offset != first + end - start:
                self._runs.append((first, memory[start:end]))
                start, first = end, offset
            flat = memory[end : end + tensor.numel() * tensor.element_size()]
            targets, sources = by_dtype.setdefault(tensor.dtype, ([], []))
            targets.append(flat.view(tensor.dtype).view(tensor.shape))
            sources.append(tensor)
            end += _room(tensor)
        self._runs.append((first, memory[start:end]))
        for targets, sources in by_dtype.values():
            torch._foreach_copy_(targets, sources)

    def pieces(self, num_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The copies as bytes, with their place in the arena, in pieces of at most so many."""
        for first, run in self._runs:
            for start in range(0, run.numel(), num_bytes):
                yield first + start, run[start : start + num_bytes]

    def release(self) -> None:
        """Give the memory back to the driver; the copies are gone."""
        self._runs.clear()  # before the pool, which frees only what nobody uses
        self._pool = None


def copies_if_room(tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> DeviceCopies | None:
    """Copies of `tensors`, unless the driver has too little memory that training has not asked for so far.

    Ranks:
        Local. Ranks may decide differently: what is saved is the same.
    """
    if not tensors or tensors[0].device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(tensors[0].device)
    if free < sum(map(_room, tensors)) + _MARGIN_BYTES:
        return None
    try:
        return DeviceCopies(tensors, offsets)
    except torch.OutOfMemoryError:
        return None  # another process took it meanwhile


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
