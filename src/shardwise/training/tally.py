"""What ranks add up in a step: tokens, the loss, whether to stop. Read a step later, so that no step waits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.sharding.mesh import data_parallel_mesh
from shardwise.training.step_clock import Lap, StepClock


@dataclass(frozen=True, slots=True)
class Reading:
    """A step in numbers, the same on every rank."""

    step: int
    """From 1."""
    loss: float
    """Mean over the tokens of all ranks."""
    grad_norm: float
    """Before clipping."""
    tokens: int
    """Learnt in this step, over all ranks."""
    seconds: float
    """That it took this rank."""


class Tally:
    """Adds up tokens and losses over ranks, in two all-reduces of a few numbers a step.

    The sums stay on the device. From an accelerator, copies travel to the host meanwhile and are read a step later.

    Args:
        mesh: Of all ranks. Ranks that share a layer's matrices share their batch: it counts once.

    Ranks:
        `count` and `mean` are collective, the rest is local.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.num_ranks = data_parallel_mesh(mesh).size()
        """Ranks that have batches of their own."""
        self.stop_agreed = False
        """Whether some rank was asked to stop: what all ranks know from the steps read so far."""
        self.failed = False
        """Whether some rank had no batch in one of the steps read so far."""
        self._device = torch.device(mesh.device_type)
        self._copies = mesh.size() // self.num_ranks
        self._tokens = self._stop = torch.zeros((), dtype=torch.float64, device=self._device)
        self._in_flight: tuple[int, Tensor, Lap] | None = None
        self.clock = StepClock(self._device)

    def count(self, num_tokens: Tensor, *, failed: bool = False) -> Tensor:
        """The tokens of this step on all ranks, from those on this one; on the device.

        Args:
            num_tokens: 0-d, on any device.
            failed: This rank has no batch. The number is NaN then, and so is all that is divided by it.
        """
        own = num_tokens.to(self._device, torch.float64, copy=True)
        self._tokens = self._sum(own.fill_(math.nan) if failed else own)
        return self._tokens

    def mean(self, loss: Tensor, *, stop: bool = False) -> Tensor:
        """The mean of all ranks' losses, on the device; and all hear whether one was asked to stop.

        Args:
            loss: This rank's part, 0-d.
            stop: This rank was asked to stop.
        """
        asked = torch.full((), float(stop), dtype=torch.float64, device=self._device)  # a copy from here could wait
        sums = self._sum(torch.stack([loss.detach().to(self._device, torch.float64), asked]))
        self._stop = sums[1]
        return sums[0] / self.num_ranks

    def note(self, step: int, loss: Tensor, grad_norm: Tensor) -> list[Reading]:
        """Send the numbers of a step on their way; return those that have come.

        Args:
            step: Which, from 1. On the CPU its numbers come at once, else with the next step.
            loss: From `mean`.
            grad_norm: The same on every rank.
        """
        readings = self.settle()
        row = torch.stack([number.detach().to(self._tokens) for number in (loss, grad_norm, self._tokens, self._stop)])
        self._in_flight = (step, _to_host(row), self.clock.lap())
        return readings + (self.settle() if self._device.type == "cpu" else [])

    def settle(self) -> list[Reading]:
        """The numbers that were not returned yet, if any. Waits for them."""
        if self._in_flight is None:
            return []
        (step, row, lap), self._in_flight = self._in_flight, None
        lap.wait()  # its end was marked after the copy
        loss, norm, tokens, stop = row.tolist()
        self.stop_agreed = self.stop_agreed or stop > 0
        if math.isnan(tokens):
            self.failed = True
            return []
        return [Reading(step, loss, norm, round(tokens), lap.seconds)]

    def _sum(self, numbers: Tensor) -> Tensor:
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(numbers)
        return numbers / self._copies if self._copies > 1 else numbers


def _to_host(row: Tensor) -> Tensor:
    if row.device.type == "cpu":
        return row
    return torch.empty(row.shape, dtype=row.dtype, pin_memory=True).copy_(row, non_blocking=True)
