"""Buffers that a block writes, such as batch statistics: a recomputation starts from what they held."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
Place = tuple[nn.Module, str]


def is_known_to_write(module: nn.Module) -> bool:
    """Whether the module holds a batch norm or a parametrisation with buffers, such as a spectral norm."""
    return any(
        isinstance(inner, _BATCH_NORMS)
        or (isinstance(inner, ParametrizationList) and next(inner.buffers(), None) is not None)
        for inner in module.modules()
    )


class WrittenBuffers:
    """The buffers of one block, watched in its first run of each mode to learn which ones it writes.

    Args:
        module: The block.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._places: list[Place] = [
            (inner, name) for inner in module.modules() for name, buffer in inner._buffers.items() if buffer is not None
        ]
        self._written: dict[bool, list[Place]] = {}

    def __bool__(self) -> bool:
        return bool(self._written.get(self.module.training, self._places))

    def run(self) -> "Run":
        """What the buffers hold now, before a run that may be repeated."""
        training = self.module.training
        return Run(self, self._written.get(training, self._places), training)

    def knows(self, training: bool) -> bool:
        """Whether a run in this mode has been watched."""
        return training in self._written

    def learn(self, training: bool, written: list[Place]) -> None:
        """Remember what a run wrote; from now on only that is copied."""
        self._written[training] = written


class Run:
    """One run of a block: the values its buffers had before.

    Args:
        buffers: To tell which ones were written.
        places: Buffers to copy.
        training: The mode of the run.
    """

    def __init__(self, buffers: WrittenBuffers, places: list[Place], training: bool) -> None:
        self._buffers, self._training = buffers, training
        self._before: dict[Place, tuple[torch.Tensor, int, torch.Tensor]] = {}
        for module, name in places:
            if (buffer := module._buffers.get(name)) is not None:
                self._before[module, name] = (buffer, buffer._version, buffer.detach().clone())

    @contextmanager
    def first(self) -> Iterator[None]:
        """Around the run itself."""
        yield
        if not self._buffers.knows(self._training):
            self._before = {place: held for place, held in self._before.items() if _is_written(place, *held)}
            self._buffers.learn(self._training, list(self._before))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around its repetition, which sees and writes copies of what was there before."""
        now = {place: place[0]._buffers[place[1]] for place in self._before}
        for (module, name), (_, _, value) in self._before.items():
            module._buffers[name] = value.clone()
        try:
            yield
        finally:
            for (module, name), buffer in now.items():
                module._buffers[name] = buffer


def _is_written(place: Place, buffer: torch.Tensor, version: int, value: torch.Tensor) -> bool:
    """Whether the buffer has changed. Batch norm writes without counting it as a new version."""
    now = place[0]._buffers.get(place[1])
    return now is not buffer or now._version != version or not torch.equal(now, value)
