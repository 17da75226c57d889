"""Activation offloading: copies to host memory during forward, and back before backward."""

import weakref
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

_MIN_BYTES = 2**22
"""Minimum size of offloaded tensors: each copy has a fixed cost."""


class HostActivations:
    """Activations of one model's blocks in host memory, in the order of calls.

    Copies run on two separate streams, one per direction. When backward reaches a block, the activations of the block
    before it are fetched too, so that these copies overlap with computation.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, tuple[Any, Any]] = {}
        self._last: weakref.ref[OffloadedCall] | None = None

    def call(self, module: nn.Module) -> "OffloadedCall":
        """Return a new call of a block."""
        previous = self._last() if self._last is not None else None
        call = OffloadedCall(self, module, previous)
        self._last = weakref.ref(call)
        return call

    def streams(self, device: torch.device) -> tuple[Any, Any]:
        """Return the streams of copies to host memory and back."""
        if device not in self._streams:
            self._streams[device] = torch.Stream(device), torch.Stream(device)
        return self._streams[device]


class OffloadedCall:
    """Activations saved by one call of a block.

    Args:
        activations: Offloaded activations of the model.
        module: The block; its parameters stay on the device.
        previous: The offloaded call before this one, which backward reaches next.
    """

    def __init__(self, activations: HostActivations, module: nn.Module, previous: "OffloadedCall | None") -> None:
        self._activations, self._module = activations, module
        self._previous = None if previous is None else weakref.ref(previous)
        self._kept: list[weakref.ref[HostTensor]] = []
        self._seen: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[HostTensor]]] = {}

    def hooks(self) -> saved_tensors_hooks:
        """Return the context for the forward of the block."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def fetch(self) -> None:
        """Start copying offloaded activations back."""
        for kept in self._kept:
            if (tensor := kept()) is not None:
                tensor.fetch()

    def _pack(self, tensor: torch.Tensor) -> Any:
        if not self._is_offloaded(tensor):
            return tensor
        storage = StorageWeakRef(tensor.untyped_storage())
        key = (storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        known = self._seen.get(key)  # several operations may save the same tensor
        if known is not None and not known[0].expired() and (kept := known[1]()) is not None:
            return kept
        kept = HostTensor(tensor, self, self._activations.streams(tensor.device))
        self._kept.append(weakref.ref(kept))
        self._seen[key] = storage, weakref.ref(kept)
        return kept

    def _is_offloaded(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type == "cpu" or tensor.nbytes < _MIN_BYTES or type(tensor) is not torch.Tensor:
            return False
        if tensor.nbytes != tensor.untyped_storage().nbytes():
            return False  # a part of a larger tensor, whose memory would stay allocated
        # Not before this point: groups inside the block are unsharded during its forward.
        unsharded = (p for p in self._module.parameters() if not isinstance(p, DTensor))
        address = tensor.untyped_storage().data_ptr()
        return all(address != parameter.untyped_storage().data_ptr() for parameter in unsharded)

    def _unpack(self, kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        self.fetch()
        if self._previous is not None and (previous := self._previous()) is not None:
            previous.fetch()
        return kept.take()


class HostTensor:
    """A tensor in pinned host memory.

    Args:
        tensor: Tensor on the device.
        call: The block's call; kept alive because backward fetches all tensors of the call.
        streams: Streams of copies to host memory and back.
    """

    def __init__(self, tensor: torch.Tensor, call: OffloadedCall, streams: tuple[Any, Any]) -> None:
        self.call, self._device = call, tensor.device
        self._out, self._back = streams
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._fetched: tuple[torch.Tensor, Any] | None = None
        self._is_taken = False
        self._out.wait_stream(torch.accelerator.current_stream(self._device))
        with self._out:
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._out)
        self._copied = self._out.record_event()

    def fetch(self) -> None:
        """Start copying it back, unless backward has used it."""
        if self._fetched is not None or self._is_taken:
            return
        # Allocated on the compute stream, whose memory pool holds activations.
        tensor = torch.empty_like(self._host, device=self._device)
        self._back.wait_event(self._copied)
        self._back.wait_stream(torch.accelerator.current_stream(self._device))
        with self._back:
            tensor.copy_(self._host, non_blocking=True)
        self._fetched = tensor, self._back.record_event()

    def __del__(self) -> None:
        """Keep the memory of an unused copy until the copy is complete."""
        if self._fetched is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._fetched[1])

    def take(self) -> torch.Tensor:
        """Return the tensor on the device, for the compute stream."""
        self._is_taken = False  # a retained graph may run again
        self.fetch()
        assert self._fetched is not None
        (tensor, arrived), self._fetched = self._fetched, None  # freed as soon as backward has used it
        self._is_taken = True
        torch.accelerator.current_stream(self._device).wait_event(arrived)
        return tensor
