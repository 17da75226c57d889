"""Copy a run's tensors while the run goes on, and make whoever changes them wait until they are copied.

Parameters and optimizer states stay as they are until the next optimizer step, so the copy has all of the next forward
and backward; every `optimizer.step()` waits for it. Where a GPU has room, they are first copied on it, and no step
waits. What may change earlier (buffers, random numbers) is copied at once. A change that came another way is noticed,
and the save fails: a torn checkpoint is worse than none.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.checkpointing.saving.arena import Arena
from shardwise.checkpointing.saving.device_copies import DeviceCopies, copies_if_room
from shardwise.errors import CheckpointError

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
        fix="save after the change, or call shardwise.checkpointing.saving.staging.wait_for_copies() before it, "
        "or Checkpointer(..., asynchronous=False)",
    )
