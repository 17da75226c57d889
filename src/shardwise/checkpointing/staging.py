"""Copies of the state in shared memory, which later writes to the tensors do not change."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from shardwise import compat
from shardwise.checkpointing.contents import LocalChunk

_ALIGNMENT = 64  # at least the size of any dtype; copies do not share cache lines
_GRAIN = 1 << 21
_MARGIN_BYTES = 4 << 30  # for libraries that allocate from the driver directly
_CHUNK_BYTES = 64 << 20  # limits how long another copy that training waits for (a loss) can be delayed
_POLL_S = 0.002


@dataclass(eq=False, slots=True)
class StagedTensor:
    """A chunk of a tensor in this rank's memory."""

    chunk: LocalChunk
    memory: torch.Tensor
    """This rank's chunk, on any device, with any strides."""
    kind: Literal["sharded", "plain", "own"]
    """`sharded`: chunk of a DTensor, equal on all ranks that hold it. `plain`: whole tensor on each rank, which may
    differ between ranks. `own`: only this rank has it."""
    offset: int = 0
    """Offset of its copy in the arena."""

    @property
    def end(self) -> int:
        """First offset after its copy."""
        return self.offset + -(-self.chunk.num_bytes // _ALIGNMENT) * _ALIGNMENT


class Arena:
    """A block of shared memory; to grow, it is replaced by a larger one."""

    def __init__(self) -> None:
        self.descriptor = -1
        """File descriptor of the memory, for `mmap` in another process."""
        self.generation = 0
        """Increases whenever the memory is replaced."""
        self.num_bytes = 0
        self._map: mmap.mmap | None = None
        self._is_pinned = False

    def place(self, staged_tensors: Sequence[StagedTensor]) -> None:
        """Assign an offset to every tensor; grow the memory if needed, which discards its contents."""
        end = 0
        # Tensors of one GPU are adjacent, so that they can be copied together.
        for staged in sorted(staged_tensors, key=lambda each: str(each.memory.device)):
            staged.offset = end
            end = staged.end
        if end > self.num_bytes or self._map is None:
            self.close()
            size = max(-(-end // _GRAIN), 1) * _GRAIN
            # No file system limits its size, no other process can open it, and it is freed with its last user.
            self.descriptor = os.memfd_create("shardwise-checkpoint", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, size)
            self._map = mmap.mmap(self.descriptor, size)
            self.num_bytes = size
            self.generation += 1
            with contextlib.suppress(OSError, AttributeError):  # fewer, larger pages if the system supports them
                self._map.madvise(mmap.MADV_HUGEPAGE)
        if not self._is_pinned and any(staged.memory.device.type == "cuda" for staged in staged_tensors):
            self._is_pinned = compat.pin_host_memory(self._address(), self.num_bytes)

    def touch(self) -> None:
        """Fault in all pages now."""
        ctypes.memset(self._address(), 0, self.num_bytes)

    def view(self) -> memoryview:
        """Return all bytes; empty if no memory is allocated."""
        return memoryview(self._map if self._map is not None else b"")

    def tensor(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor in this memory for a copy of `like`."""
        assert self._map is not None
        if like.numel() == 0:
            return torch.empty(like.shape, dtype=like.dtype, device="cpu")
        flat = torch.frombuffer(self._map, dtype=torch.uint8, offset=offset, count=like.nbytes)
        return flat.view(like.dtype).view(like.shape)

    def close(self) -> None:
        """Free the memory once nothing refers to it."""
        if self._is_pinned:
            compat.unpin_host_memory(self._address())
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self._map, self._is_pinned, self.descriptor, self.num_bytes = None, False, -1, 0

    def _address(self) -> int:
        assert self._map is not None
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))


class AsyncCopy:
    """A copy of staged tensors into an arena; writes to the tensors after the constructor do not affect it.

    CPU tensors are copied when the constructor returns. Copies from an accelerator are queued before any later work on
    the current stream, and are complete when `run` returns.
    """

    def __init__(self, staged_tensors: Sequence[StagedTensor], arena: Arena) -> None:
        self._arena = arena
        self._events: list[Any] = []
        self._aside: list[Any] = []  # memory pools, each with the copies in it
        by_device: dict[torch.device, list[StagedTensor]] = {}
        with torch.no_grad():
            for staged in staged_tensors:
                if staged.memory.device.type == "cpu":
                    arena.tensor(staged.offset, staged.memory).copy_(staged.memory)
                else:
                    by_device.setdefault(staged.memory.device, []).append(staged)
            for device, on_device in by_device.items():
                self._start_on(device, sorted(on_device, key=lambda staged: staged.offset))

    def run(self) -> None:
        """Wait for the accelerators; call it in a separate thread."""
        for event in self._events:
            while not event.query():  # synchronize() would keep a CPU core busy polling
                time.sleep(_POLL_S)
        while self._aside:
            self._aside.pop()  # free the copies before their pool, which frees only unused memory

    def _start_on(self, device: torch.device, staged_tensors: Sequence[StagedTensor]) -> None:
        """Queue the copies from one accelerator to the host."""
        aside = copy_on_device(staged_tensors)
        stream: Any = torch.accelerator.current_stream(device)
        if aside:
            training, stream = stream, torch.Stream(device, priority=0)
            stream.wait_stream(training)
            with stream:
                _copy_in_chunks(aside[-1], self._arena.tensor(staged_tensors[0].offset, aside[-1]))
        else:  # without memory for a copy on the device, training's next operations wait for the transfer
            for staged in staged_tensors:
                _copy_in_chunks(staged.memory, self._arena.tensor(staged.offset, staged.memory))
        self._events.append(stream.record_event())
        self._aside += aside


def copy_on_device(staged_tensors: Sequence[StagedTensor]) -> list[Any]:
    """Queue a copy of one GPU's staged tensors on the same GPU, in the arena's layout, so training need not wait.

    Returns the memory pool and the copy; empty if the driver has too little free memory.
    """
    if not staged_tensors or staged_tensors[0].memory.device.type != "cuda":
        return []
    device, base = staged_tensors[0].memory.device, staged_tensors[0].offset
    num_bytes = staged_tensors[-1].end - base
    if torch.cuda.mem_get_info(device)[0] < num_bytes + _MARGIN_BYTES:
        return []
    pool: Any = torch.cuda.MemPool()  # a separate pool: training's cache neither grows nor fragments
    try:
        with torch.cuda.use_mem_pool(pool, device):
            copies = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return []  # another process took the memory meanwhile
    by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for staged in staged_tensors:
        memory, start = staged.memory, staged.offset - base
        targets, sources = by_dtype.setdefault(memory.dtype, ([], []))
        targets.append(copies[start : start + memory.nbytes].view(memory.dtype).view(memory.shape))
        sources.append(memory)
    for targets, sources in by_dtype.values():
        torch._foreach_copy_(targets, sources)
    return [pool, copies]


def _copy_in_chunks(memory: torch.Tensor, target: torch.Tensor) -> None:
    """Queue the copy of GPU memory in chunks, so that other copies can run in between."""
    if not memory.is_contiguous() or memory.nbytes <= _CHUNK_BYTES:
        target.copy_(memory, non_blocking=True)
        return
    size = _CHUNK_BYTES // memory.element_size()
    for part, into in zip(memory.view(-1).split(size), target.view(-1).split(size), strict=True):
        into.copy_(part, non_blocking=True)
