"""How long steps take by the device's own clock: when Python hears of a step's end says little about its length."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

Moment = float | torch.Event


@dataclass(frozen=True, slots=True)
class Lap:
    """From one moment to another, on the CPU or on an accelerator."""

    start: Moment
    end: Moment

    def wait(self) -> None:
        """Until the end is reached."""
        if isinstance(self.end, torch.Event):
            self.end.synchronize()

    @property
    def seconds(self) -> float:
        """Its length, once the end is reached."""
        if isinstance(self.start, torch.Event) and isinstance(self.end, torch.Event):
            return self.start.elapsed_time(self.end) / 1e3
        assert isinstance(self.start, float)
        assert isinstance(self.end, float)
        return self.end - self.start


class StepClock:
    """Laps of a loop, one after the other.

    Args:
        device: Whose time counts. On an accelerator a moment is a mark in its queue; nothing waits.

    Ranks:
        Local.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = self._now()

    def lap(self) -> Lap:
        """From the end of the lap before, or the restart, until what is queued now is done."""
        now = self._now()
        lap, self._last = Lap(self._last, now), now
        return lap

    def restart(self) -> None:
        """What was since the last lap belongs to none."""
        self._last = self._now()

    def _now(self) -> Moment:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event
