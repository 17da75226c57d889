"""Bytes of tensors that no file holds as they are: computed when they are read, and let go when others are."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping

import torch

from shardwise.checkpointing.storage.memory import bytes_of

_MAX_HELD = 2  # readers go through a checkpoint in order, a few threads at a time


class Computations:
    """Groups of tensors that are computed together; the last few outcomes are held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[Callable[[], Mapping[str, torch.Tensor]], dict[str, memoryview]] = OrderedDict()

    def bytes_of(self, compute: Callable[[], Mapping[str, torch.Tensor]], name: str) -> memoryview:
        """The bytes of tensor `name`, of those that `compute` makes."""
        with self._lock:
            if compute not in self._held:
                while len(self._held) >= _MAX_HELD:
                    self._held.popitem(last=False)
                made = compute()
                self._held[compute] = {key: bytes_of(tensor.contiguous()) for key, tensor in made.items()}
            self._held.move_to_end(compute)
            return self._held[compute][name]


class ComputedBytes:
    """What a `Piece` holds in place of bytes.

    Args:
        computations: Shared by all tensors of a checkpoint.
        compute: Makes this tensor, and perhaps others.
        name: Of this one among them.
    """

    def __init__(
        self, computations: Computations, compute: Callable[[], Mapping[str, torch.Tensor]], name: str
    ) -> None:
        self._computations, self._compute, self._name = computations, compute, name

    def __getitem__(self, part: slice) -> memoryview:
        return self._computations.bytes_of(self._compute, self._name)[part]
