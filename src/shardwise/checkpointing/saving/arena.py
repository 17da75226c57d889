"""Memory that two processes share: tensors are copied into it here, and written to disk from it there.

It is kept from save to save, because getting memory from the system costs as much as copying into it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import torch

from shardwise import compat

ALIGNMENT = 64
"""Every tensor starts at a multiple of this: no dtype is wider, and a cache line is never shared."""
_GRAIN = 1 << 21


class Arena:
    """One run of shared memory, replaced by a larger one when it must hold more."""

    def __init__(self) -> None:
        self.descriptor = -1
        """Of the memory, for `mmap` in another process."""
        self.generation = 0
        """Another one each time the memory is another."""
        self.num_bytes = 0
        self._map: mmap.mmap | None = None
        self._is_pinned = False

    def reserve(self, num_bytes: int, *, pinned: bool) -> None:
        """Make room for that many bytes. What the arena held is lost if it must grow.

        Args:
            num_bytes: To hold.
            pinned: A GPU will copy into it.
        """
        if num_bytes > self.num_bytes:
            self.close()
            size = max(-(-num_bytes // _GRAIN), 1) * _GRAIN
            # No file system limits it, no other process can open it, and it is gone with the last who holds it.
            self.descriptor = os.memfd_create("shardwise-checkpoint", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, size)
            self._map = mmap.mmap(self.descriptor, size)
            self.num_bytes = size
            self.generation += 1
            with contextlib.suppress(OSError, AttributeError):  # fewer, larger pages where the system has them
                self._map.madvise(mmap.MADV_HUGEPAGE)
        if pinned and not self._is_pinned:
            self._is_pinned = compat.pin_host_memory(self._address(), self.num_bytes)

    def touch(self) -> None:
        """Have the system give out all of the memory now rather than page by page while it is written."""
        ctypes.memset(self._address(), 0, self.num_bytes)

    def buffer(self, offset: int, num_bytes: int) -> memoryview:
        """The bytes of one tensor."""
        assert self._map is not None
        return memoryview(self._map)[offset : offset + num_bytes]

    def tensor(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        """Room for a copy of `like`, contiguous."""
        assert self._map is not None
        if like.numel() == 0:
            return torch.empty(like.shape, dtype=like.dtype, device="cpu")
        count = like.numel() * like.element_size()
        flat = torch.frombuffer(self._map, dtype=torch.uint8, offset=offset, count=count)
        return flat.view(like.dtype).view(like.shape)

    def close(self) -> None:
        """Give the memory back, once nobody looks at it any more."""
        if self._is_pinned:
            compat.unpin_host_memory(self._address())
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self._map, self._is_pinned, self.descriptor, self.num_bytes = None, False, -1, 0

    def _address(self) -> int:
        assert self._map is not None
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))


def place_in_arena(sizes: list[int]) -> tuple[list[int], int]:
    """Where tensors of these sizes in bytes go, one after another, and how much room they need."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end
