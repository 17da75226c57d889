"""Copies of the state in shared memory, taken while training waits."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise import compat
from shardwise.checkpointing.contents import LocalChunk
from shardwise.errors import CheckpointError

_ALIGNMENT = 64  # no dtype is wider, and a cache line is never shared
_GRAIN = 1 << 21
_MARGIN_BYTES = 4 << 30  # left to libraries that take memory from the driver themselves
_CHUNK_BYTES = 64 << 20  # a copy that training waits for (a loss) must not stand behind gigabytes of ours
_POLL_S = 0.002
_SMALL_BYTES = 4096  # step counts lie on the CPU even where all else is on a GPU
_lock = threading.Lock()
_active: set[AsyncCopy] = set()


@dataclass(eq=False, slots=True)
class StagedTensor:
    """A chunk of a tensor in this rank's memory."""

    chunk: LocalChunk
    memory: torch.Tensor
    """This rank's part, on any device, of any strides."""
    owner: torch.Tensor
    """The tensor it is a part of, whose count of changes tells whether somebody wrote to it."""
    kind: Literal["sharded", "plain", "own"]
    """`sharded`: of a DTensor, equal on all ranks that hold it. `plain`: whole on each rank, which may
    differ. `own`: of this rank alone."""
    unchanged_until_step: bool
    """Only an optimizer step changes it."""
    offset: int = 0
    """Where its copy lies in the arena."""

    @property
    def end(self) -> int:
        """Where the next one's copy may begin."""
        return self.offset + -(-self.chunk.num_bytes // _ALIGNMENT) * _ALIGNMENT

    def version(self) -> tuple[int, ...]:
        """Another one after every change that torch counts; it does not count fused steps, but those wait."""
        # The memory is a view of the owner's local tensor, and views share the count.
        return tuple(0 if tensor.is_inference() else tensor._version for tensor in (self.owner, self.memory))


class Arena:
    """A block of shared memory, which grows by replacement."""

    def __init__(self) -> None:
        self.descriptor = -1
        """Of the memory, for `mmap` in another process."""
        self.generation = 0
        """Another one each time the memory is another."""
        self.num_bytes = 0
        self._map: mmap.mmap | None = None
        self._is_pinned = False

    def place(self, staged_tensors: Sequence[StagedTensor]) -> None:
        """Assign an offset to every tensor, and grow if needed, which discards the contents."""
        end = 0
        # What a GPU copies in one go lies together.
        for staged in sorted(staged_tensors, key=lambda each: (not each.unchanged_until_step, str(each.memory.device))):
            staged.offset = end
            end = staged.end
        if end > self.num_bytes or self._map is None:
            self.close()
            size = max(-(-end // _GRAIN), 1) * _GRAIN
            # No file system limits it, no other process can open it, and it is gone with the last who holds it.
            self.descriptor = os.memfd_create("shardwise-checkpoint", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, size)
            self._map = mmap.mmap(self.descriptor, size)
            self.num_bytes = size
            self.generation += 1
            with contextlib.suppress(OSError, AttributeError):  # fewer, larger pages where the system has them
                self._map.madvise(mmap.MADV_HUGEPAGE)
        if not self._is_pinned and any(staged.memory.device.type == "cuda" for staged in staged_tensors):
            self._is_pinned = compat.pin_host_memory(self._address(), self.num_bytes)

    def touch(self) -> None:
        """Fault in all pages now."""
        ctypes.memset(self._address(), 0, self.num_bytes)

    def view(self) -> memoryview:
        """Return all bytes; empty without memory."""
        return memoryview(self._map if self._map is not None else b"")

    def tensor(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor for a copy of `like`."""
        assert self._map is not None
        if like.numel() == 0:
            return torch.empty(like.shape, dtype=like.dtype, device="cpu")
        flat = torch.frombuffer(self._map, dtype=torch.uint8, offset=offset, count=like.nbytes)
        return flat.view(like.dtype).view(like.shape)

    def close(self) -> None:
        """Free the memory when it has no more readers."""
        if self._is_pinned:
            compat.unpin_host_memory(self._address())
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self._map, self._is_pinned, self.descriptor, self.num_bytes = None, False, -1, 0

    def _address(self) -> int:
        assert self._map is not None
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))


def wait_for_copies() -> None:
    """Wait for all copies; call it before changing a tensor in the middle of a step.

    Optimizer steps and `EMA.update` do so themselves. Almost free when nothing is being saved.
    """
    for copy in list(_active):
        copy.gate()


class AsyncCopy:
    """One copy of staged tensors into an arena, from the moment it is made until `run` returns."""

    def __init__(self, staged_tensors: Sequence[StagedTensor], arena: Arena) -> None:
        self._arena = arena
        self._is_copied = threading.Event()  # what lies in CPU memory; a GPU makes its own streams wait
        self._events: list[Any] = []
        self._gates: list[Any] = []  # those of them that come before the sources may change
        self._aside: list[Any] = []  # memory pools, each with the copies in it
        self._later: list[StagedTensor] = []
        self._pending: list[tuple[StagedTensor, tuple[int, ...]]] = []
        self._changed: list[str] | None = None
        with torch.no_grad():
            self._start(staged_tensors)
        with _lock:
            _install_hook()
            _active.add(self)

    def run(self) -> None:
        """Copy the remaining tensors and wait for the GPU; in a separate thread."""
        try:
            with torch.no_grad():
                for staged in self._later:
                    _copy_now(staged.memory, self._arena.tensor(staged.offset, staged.memory))
            self._is_copied.set()
            for event in self._events:
                while not event.query():  # synchronize() would keep a core busy with asking
                    time.sleep(_POLL_S)
            self._judge()
        finally:
            self._is_copied.set()
            while self._aside:
                self._aside.pop()  # the copies before their pool, which frees only what nobody uses
            with _lock:
                _active.discard(self)
                self._later, self._pending = [], []  # let go of the run's tensors
        if names := self._changed:
            raise CheckpointError(
                f"{len(names)} tensors were modified while they were being saved",
                where=", ".join(names[:5]) + (", …" if len(names) > 5 else ""),
                why="a save in the background copies parameters and optimizer states until the next optimizer step; "
                "the copy may be inconsistent, so it was dropped",
                fix="save after the change, or call shardwise.checkpointing.staging.wait_for_copies() before it, "
                "or Checkpointer(..., asynchronous=False)",
            )

    def gate(self) -> None:
        """Block changes of the sources until they are copied; on a GPU, block later kernels."""
        if self._later:
            self._is_copied.wait()
        self._judge()
        for event in self._gates:
            event.wait()  # the current stream waits, not this thread

    def _start(self, staged_tensors: Sequence[StagedTensor]) -> None:
        steady_by_device: dict[torch.device, list[StagedTensor]] = {}
        for staged in staged_tensors:
            memory = staged.memory
            is_on_cpu = memory.device.type == "cpu"
            if not is_on_cpu:
                steady_by_device.setdefault(memory.device, [])
            if not staged.unchanged_until_step or (is_on_cpu and memory.nbytes <= _SMALL_BYTES):
                # On a GPU this is queued on the current stream: what comes after it there may change the source.
                copy = _copy_now if is_on_cpu else _copy_in_chunks
                copy(memory, self._arena.tensor(staged.offset, memory))
            elif is_on_cpu:
                self._pending.append((staged, staged.version()))
                self._later.append(staged)
            else:
                steady_by_device[memory.device].append(staged)
        for device, unchanged_until_step in steady_by_device.items():
            self._start_on(device, sorted(unchanged_until_step, key=lambda staged: staged.offset))

    def _start_on(self, device: torch.device, staged_tensors: Sequence[StagedTensor]) -> None:
        """Queue the copies from one accelerator to the host, on a stream of their own."""
        aside = copy_on_device(staged_tensors)
        stream: Any = torch.Stream(device, priority=0)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            if aside:
                _copy_in_chunks(aside[-1], self._arena.tensor(staged_tensors[0].offset, aside[-1]))
            else:
                for staged in staged_tensors:
                    _copy_in_chunks(staged.memory, self._arena.tensor(staged.offset, staged.memory))
        copied = stream.record_event()
        self._events += [copied, torch.accelerator.current_stream(device).record_event()]
        self._aside += aside
        if not aside:
            self._gates.append(copied)
            self._pending += [(staged, staged.version()) for staged in staged_tensors]

    def _judge(self) -> None:
        """See whether anything was changed so far; once, because after the gate it may be."""
        with _lock:
            if self._changed is None:
                self._changed = [each.chunk.name for each, version in self._pending if each.version() != version]


def copy_on_device(staged_tensors: Sequence[StagedTensor]) -> list[Any]:
    """Queue a copy of one GPU's staged tensors on it, laid out as in the arena, so that the next step need not wait.

    The memory pool and the copy; nothing where the driver has too little memory that training has not asked for.
    """
    if not staged_tensors or staged_tensors[0].memory.device.type != "cuda":
        return []
    device, base = staged_tensors[0].memory.device, staged_tensors[0].offset
    num_bytes = staged_tensors[-1].end - base
    if torch.cuda.mem_get_info(device)[0] < num_bytes + _MARGIN_BYTES:
        return []
    pool: Any = torch.cuda.MemPool()  # its own: training's cache neither grows by it nor is cut up
    try:
        with torch.cuda.use_mem_pool(pool, device):
            copies = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return []  # another process took it meanwhile
    by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for staged in staged_tensors:
        memory, start = staged.memory, staged.offset - base
        targets, sources = by_dtype.setdefault(memory.dtype, ([], []))
        targets.append(copies[start : start + memory.nbytes].view(memory.dtype).view(memory.shape))
        sources.append(memory)
    for targets, sources in by_dtype.values():
        torch._foreach_copy_(targets, sources)
    return [pool, copies]


@functools.cache
def _install_hook() -> None:
    # Never removed: it costs nothing, and a hook cannot be removed while hooks run.
    register_optimizer_step_pre_hook(lambda *_unused: wait_for_copies())


def _copy_now(memory: torch.Tensor, target: torch.Tensor) -> None:
    """Copy CPU memory on one core: the others are training."""
    if memory.is_contiguous() and not memory.is_conj() and not memory.is_neg():
        ctypes.memmove(target.data_ptr(), memory.data_ptr(), memory.nbytes)
    else:
        target.copy_(memory)


def _copy_in_chunks(memory: torch.Tensor, target: torch.Tensor) -> None:
    """Queue the copy of GPU memory, in chunks between which other copies find room."""
    if not memory.is_contiguous() or memory.nbytes <= _CHUNK_BYTES:
        target.copy_(memory, non_blocking=True)
        return
    size = _CHUNK_BYTES // memory.element_size()
    for part, into in zip(memory.view(-1).split(size), target.view(-1).split(size), strict=True):
        into.copy_(part, non_blocking=True)
