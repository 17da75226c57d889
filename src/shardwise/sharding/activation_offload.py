"""Activation offloading: copied to host memory during forward, and back before backward needs them."""

import weakref
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

_MIN_BYTES = 2**22
"""Smaller tensors stay on the device: each copy has a fixed cost."""


class HostActivations:
    """Activations of one model's blocks in host memory, in the order of calls.

    Copies run on streams of their own, one for each direction. Before backward reaches a block, the block before it is
    fetched too, so that its copies overlap with computation.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, tuple[Any, Any]] = {}
        self._last: weakref.ref[OffloadedCall] | None = None

    def call(self, module: nn.Module) -> "OffloadedCall":
        """A new call of a block."""
        previous = self._last() if self._last is not None else None
        call = OffloadedCall(self, module, previous)
        self._last = weakref.ref(call)
        return call

    def streams(self, device: torch.device) -> tuple[Any, Any]:
        """To host memory, and back."""
        if device not in self._streams:
            self._streams[device] = torch.Stream(device), torch.Stream(device)
        return self._streams[device]


class OffloadedCall:
    """Activations saved by one call of a block.

    Args:
        activations: Of the model.
        module: The block; its parameters stay on the device.
        previous: The offloaded call before this one, which backward reaches next.
    """

    def __init__(self, activations: HostActivations, module: nn.Module, previous: "OffloadedCall | None") -> None:
        self._activations, self._module = activations, module
        self._previous = None if previous is None else weakref.ref(previous)
        self._kept: list[weakref.ref[HostTensor]] = []
        self._seen: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[HostTensor]]] = {}

    def hooks(self) -> saved_tensors_hooks:
        """The context in which the block runs."""
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
        known = self._seen.get(key)  # several operations may keep one tensor
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
            return False  # a part of a larger tensor, which would stay
        # Now and not before: a group inside the block is unsharded on its way.
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
        tensor: On the device.
        call: Kept alive, since backward asks it for the tensors of the same call.
        streams: To host memory, and back.
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
        # Allocated on the stream that computes, whose pool activations come from.
        tensor = torch.empty_like(self._host, device=self._device)
        self._back.wait_event(self._copied)
        self._back.wait_stream(torch.accelerator.current_stream(self._device))
        with self._back:
            tensor.copy_(self._host, non_blocking=True)
        self._fetched = tensor, self._back.record_event()

    def __del__(self) -> None:
        """Keep the memory of an unused copy until it is complete."""
        if self._fetched is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._fetched[1])

    def take(self) -> torch.Tensor:
        """Return the tensor on the device, for the compute stream."""
        self._is_taken = False  # a graph that is kept is gone through again
        self.fetch()
        assert self._fetched is not None
        (tensor, arrived), self._fetched = self._fetched, None  # freed as soon as backward has used it
        self._is_taken = True
        torch.accelerator.current_stream(self._device).wait_event(arrived)
        return tensor
