"""What a run says of its steps: a record of each in the metrics, and a line beside the progress bar."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.config.run import RunConfig
from shardwise.progress import Progress
from shardwise.training.flops import flops_per_token, mfu, peak_flops
from shardwise.training.metrics import Metrics
from shardwise.training.tally import Reading
from shardwise.units import format_bytes, format_count, format_seconds

_SMOOTHING = 0.9
"""How much of the rate that is shown is the one shown before; records hold each step's own."""


class Teller:
    """Turns readings into records and notes.

    Args:
        model: For the FLOPs of a token.
        metrics: Gets a record of each step that is due.
        progress: Is moved with every step.
        config: The run.
        device: Whose memory and speed are told.

    Ranks:
        Local. What is told is the same on every rank, but for times and memory.
    """

    def __init__(
        self,
        model: nn.Module,
        metrics: Metrics,
        progress: Progress,
        *,
        config: RunConfig,
        device: torch.device,
    ) -> None:
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self.evaluation_loss: float | None = None
        self.tokens = 0
        """Learnt by this process's steps, over all ranks."""
        self.seconds = 0.0
        """Of this process's steps, without evaluations."""
        self.data_wait_s = 0.0
        """Of them, waiting for batches."""
        self._metrics, self._progress, self._device = metrics, progress, device
        self._flops = flops_per_token(model, config.data.sequence_length)
        self._num_ranks, self._num_steps = dist.get_world_size(), config.training.steps
        self._peak = metrics.config.peak_flops or peak_flops(device)
        self._unrecorded_tokens, self._unrecorded_s = 0, 0.0
        self._step_s, self._num_counted = 0.0, 0
        self._memory, self._looked_up_s = 0, -1.0
        self._pending: dict[int, dict[str, Any]] = {}

    def expect(self, step: int, **values: Any) -> None:
        """Values that belong in the record of a step, whose reading comes later."""
        self._pending[step] = values

    def tell(self, readings: list[Reading]) -> None:
        """Record finished steps and move the bar."""
        for reading in readings:
            self._count(reading)
            values = self._pending.pop(reading.step, {})
            self.data_wait_s += values.get("data_wait_s", 0.0)
            rate = self._unrecorded_tokens / self._unrecorded_s if self._unrecorded_s else 0.0
            memory = self._used_memory()
            if self._metrics.is_due(reading.step) or reading.step == self._num_steps:
                self._metrics.record(
                    reading.step,
                    loss=reading.loss,
                    learning_rate=values.pop("learning_rate", None),
                    grad_norm=reading.grad_norm,
                    tokens=reading.tokens,
                    tokens_per_s=round(rate, 1),
                    mfu=mfu(rate, self._flops, self._num_ranks, self._peak),
                    memory_bytes=memory,
                    **values,
                )
                self._unrecorded_tokens, self._unrecorded_s = 0, 0.0
            self._progress.advance(note=self._note(reading, memory))

    def tell_evaluation(self, step: int, loss: float) -> None:
        """Record an evaluation."""
        self.evaluation_loss = loss
        self._metrics.record(step, evaluation_loss=loss)

    def go_back(self, step: int, to_step: int) -> None:
        """The run goes back to a checkpoint: steps after it are made again."""
        self._metrics.rewind(to_step)
        self._pending.clear()
        self._progress.advance(to_step - step, note=f"back to step {to_step}")

    def _count(self, reading: Reading) -> None:
        took = reading.seconds
        self.first_loss = reading.loss if self.first_loss is None else self.first_loss
        self.last_loss = reading.loss
        self.tokens += reading.tokens
        self.seconds += took
        self._unrecorded_tokens += reading.tokens
        self._unrecorded_s += took
        if self._num_counted < 2:  # the first step makes caches and buffers; the second knows nothing of it
            self._step_s = took
        self._step_s = _SMOOTHING * self._step_s + (1 - _SMOOTHING) * took
        self._num_counted += 1

    def _used_memory(self) -> int:
        """The peak so far, looked up at most once a second: tiny steps take less than the question."""
        now = time.monotonic()
        if now - self._looked_up_s >= 1.0:
            self._memory, self._looked_up_s = used_memory(self._device), now
        return self._memory

    def _note(self, reading: Reading, memory: int) -> str:
        left_s = round((self._num_steps - reading.step) * self._step_s)
        rate = format_count(reading.tokens / self._step_s) if self._step_s else "?"
        left = format_seconds(left_s) if left_s else "0 s"
        return f"loss {reading.loss:.3f}  {rate} tokens/s  {format_bytes(memory)}  {left} left"


def used_memory(device: torch.device) -> int:
    """The most bytes that this process has held so far: of the device, or of main memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
