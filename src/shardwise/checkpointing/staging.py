"""Copies of the state in shared memory, taken while training waits."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise import compat
from shardwise.errors import CheckpointError

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


_CHUNK_BYTES = 64 << 20  # a copy that training waits for (a loss) must not stand behind gigabytes of ours
_POLL_S = 0.002
_SMALL_BYTES = 4096  # step counts lie on the CPU even where all else is on a GPU
_lock = threading.Lock()
_active: set[Copying] = set()
_is_hooked = False


@dataclass(frozen=True, slots=True)
class Source:
    """Memory to be copied."""

    name: str
    memory: torch.Tensor
    """This rank's part, on any device, of any strides."""
    owner: torch.Tensor
    """The tensor it is a part of, whose count of changes tells whether somebody wrote to it."""
    offset: int
    """Where it goes in the arena."""
    is_steady: bool
    """Only an optimizer step changes it."""

    def version(self) -> tuple[int, ...]:
        """Another one after every change that torch counts; it does not count fused steps, but those wait."""
        # The memory is a view of the owner's local tensor, and views share the count.
        return tuple(0 if tensor.is_inference() else tensor._version for tensor in (self.owner, self.memory))


def wait_for_copies() -> None:
    """Return once no tensor is being copied any more; call it before changing one in the middle of a step.

    Optimizer steps and `EMA.update` do so themselves. Almost free when nothing is being saved.

    Ranks:
        Local.
    """
    for copying in list(_active):
        copying.gate()


class Copying:
    """One copy of the sources into an arena, from the moment it is made until `run` returns.

    Args:
        sources: What to copy.
        arena: Has room for them; nobody else writes to it meanwhile.

    Ranks:
        Local.
    """

    def __init__(self, sources: Sequence[Source], arena: Arena) -> None:
        self._arena = arena
        self._is_copied = threading.Event()  # what lies in CPU memory; a GPU makes its own streams wait
        self._events: list[Any] = []
        self._gates: list[Any] = []  # those of them that come before the sources may change
        self._aside: list[DeviceCopies] = []
        self._later: list[Source] = []
        self._pending: list[tuple[Source, tuple[int, ...]]] = []
        self._changed: list[str] = []
        self._is_judged = False
        with torch.no_grad():
            self._start(sources)
        with _lock:
            _install_hook()
            _active.add(self)

    def run(self) -> None:
        """Copy what was not copied at once, and wait for the GPU; in a thread of its own.

        Raises:
            CheckpointError: Something was changed while it was being copied.
        """
        try:
            with torch.no_grad():
                for source in self._later:
                    _copy_now(source.memory, self._arena.tensor(source.offset, source.memory))
            self._is_copied.set()
            for event in self._events:
                while not event.query():  # synchronize() would keep a core busy with asking
                    time.sleep(_POLL_S)
            self._judge()
        finally:
            self._is_copied.set()
            for copies in self._aside:
                copies.release()
            with _lock:
                _active.discard(self)
                self._later, self._pending, self._aside = [], [], []  # let go of the run's tensors
        if self._changed:
            raise _changed_meanwhile(self._changed)

    def gate(self) -> None:
        """Hold back whoever is about to change the sources; on a GPU, what is queued after this."""
        if self._later:
            self._is_copied.wait()
        self._judge()
        for event in self._gates:
            event.wait()  # the current stream waits, not this thread

    def _start(self, sources: Sequence[Source]) -> None:
        by_device: dict[torch.device, list[Source]] = {}
        for source in sources:
            memory, target = source.memory, self._arena.tensor(source.offset, source.memory)
            is_on_cpu = memory.device.type == "cpu"
            if not is_on_cpu:
                by_device.setdefault(memory.device, [])
            if not source.is_steady or (is_on_cpu and memory.nbytes <= _SMALL_BYTES):
                # On a GPU this is queued on the current stream: what comes after it there may change the source.
                _copy_now(memory, target) if is_on_cpu else _copy_in_chunks(memory, target)
            elif is_on_cpu:
                self._pending.append((source, source.version()))
                self._later.append(source)
            else:
                by_device[memory.device].append(source)
        for device, steady in by_device.items():
            self._start_on(device, steady)

    def _start_on(self, device: torch.device, sources: Sequence[Source]) -> None:
        """Queue the copies from one accelerator to the host, on a stream of their own."""
        aside = copies_if_room([source.memory for source in sources], [source.offset for source in sources])
        stream = _side_stream(device)
        with stream:
            if aside is not None:
                for offset, piece in aside.pieces(_CHUNK_BYTES):
                    self._arena.tensor(offset, piece).copy_(piece, non_blocking=True)
            else:
                for source in sources:
                    _copy_in_chunks(source.memory, self._arena.tensor(source.offset, source.memory))
        copied = stream.record_event()
        self._events += [copied, torch.accelerator.current_stream(device).record_event()]
        if aside is not None:
            self._aside.append(aside)
        else:
            self._gates.append(copied)
            self._pending += [(source, source.version()) for source in sources]

    def _judge(self) -> None:
        """See whether anything was changed so far; once, because after the gate it may be."""
        with _lock:
            if not self._is_judged:
                self._is_judged = True
                self._changed = [source.name for source, version in self._pending if source.version() != version]


def _install_hook() -> None:
    # Never removed: it costs nothing, and a hook cannot be removed while hooks run.
    global _is_hooked
    if not _is_hooked:
        register_optimizer_step_pre_hook(lambda *_unused: wait_for_copies())
        _is_hooked = True


def _side_stream(device: torch.device) -> Any:
    stream = torch.Stream(device, priority=0)
    stream.wait_stream(torch.accelerator.current_stream(device))
    return stream


def _copy_now(memory: torch.Tensor, target: torch.Tensor) -> None:
    """Copy CPU memory on one core: the others are training."""
    if memory.is_contiguous() and not memory.is_conj() and not memory.is_neg():
        ctypes.memmove(target.data_ptr(), memory.data_ptr(), memory.numel() * memory.element_size())
    else:
        target.copy_(memory)


def _copy_in_chunks(memory: torch.Tensor, target: torch.Tensor) -> None:
    """Queue the copy of GPU memory, in pieces between which other copies find room."""
    num_bytes = memory.numel() * memory.element_size()
    if not memory.is_contiguous() or num_bytes <= _CHUNK_BYTES:
        target.copy_(memory, non_blocking=True)
        return
    size = _CHUNK_BYTES // memory.element_size()
    for part, into in zip(memory.view(-1).split(size), target.view(-1).split(size), strict=True):
        into.copy_(part, non_blocking=True)


def _changed_meanwhile(names: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{len(names)} tensors were changed while they were being saved",
        where=", ".join(names[:5]) + (", …" if len(names) > 5 else ""),
        why="a save in the background copies parameters and optimizer states until the next optimizer step; "
        "the copy may now be half old, half new, so it was dropped",
        fix="save after the change, or call shardwise.checkpointing.staging.wait_for_copies() before it, "
        "or Checkpointer(..., asynchronous=False)",
    )
