"""What to do when a loss or a gradient is not finite: stop, leave the step out, or go back. Never train on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise import compat
from shardwise.config.run import TrainingConfig
from shardwise.errors import TrainingError


@dataclass(frozen=True, slots=True)
class BadStep:
    """A step whose loss or gradient was not finite; it has changed no weight."""

    step: int
    """Its number, from 1."""
    action: Literal["skip", "rewind"]
    """`skip`: nothing is left to do. `rewind`: go back to the last checkpoint and leave this step's batch out."""


class BadLosses:
    """Keeps bad steps away from the weights, and says what to do about them.

    On an accelerator nothing waits for the device: a fused optimizer itself leaves a bad step out, and the verdict on a
    step is given one step later. On CPU, or with an optimizer that is not fused, it is given at once.

    Args:
        config: `on_bad_loss` and `max_bad_steps`.

    Ranks:
        Local. Every rank must bring the same loss and norm, and then comes to the same verdict at the same step.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        self.num_bad = 0
        """Bad steps so far."""
        self._waiting: list[tuple[int, _Reading]] = []

    def allows(self, optimizer: Optimizer, step: int, loss: Tensor, grad_norm: Tensor) -> bool:
        """Whether to call `optimizer.step()`; where it is fused, always, since it leaves a bad step out by itself.

        Args:
            optimizer: About to step.
            step: Its number, from 1.
            loss: 0-d, the same on every rank.
            grad_norm: 0-d, the same on every rank; NaN or infinite where any gradient is.

        Ranks:
            Local.
        """
        is_bad = (~(torch.isfinite(loss.detach()) & torch.isfinite(grad_norm.detach()))).to(torch.float32)
        reading = _Reading(is_bad, loss, grad_norm)
        self._waiting.append((step, reading))
        if is_bad.is_cuda and compat.hold_back_step(optimizer, is_bad):
            return True
        reading.wait()
        return not reading.is_bad

    def verdict(self, *, wait: bool = False) -> BadStep | None:
        """The newest bad step that has come to light since the last call, if any.

        Args:
            wait: Also judge the step just made, as must be before it is saved; else only those before it, unless
                their numbers are here already.

        Raises:
            TrainingError: The policy is to stop, or there were too many.

        Ranks:
            Local.
        """
        found: BadStep | None = None
        while self._waiting and (wait or len(self._waiting) > 1 or self._waiting[0][1].is_here):
            step, reading = self._waiting.pop(0)
            reading.wait()
            if reading.is_bad:
                found = self._judge(step, reading)
        return found

    def state_dict(self) -> dict[str, Any]:
        """How many bad steps there were."""
        return {"num_bad": self.num_bad}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on; after going back, those since then stay counted."""
        self.num_bad = max(self.num_bad, int(state_dict["num_bad"]))

    def _judge(self, step: int, reading: _Reading) -> BadStep:
        self.num_bad += 1
        policy, most = self.config.on_bad_loss, self.config.max_bad_steps
        if policy != "stop" and self.num_bad <= most:
            return BadStep(step, policy)
        what = f"step {step} has loss {reading.loss:.6g} and gradient norm {reading.grad_norm:.6g}"
        raise TrainingError(
            what if policy == "stop" else f"{what}: bad step {self.num_bad} of this run",
            where="training.on_bad_loss" if policy == "stop" else "training.max_bad_steps",
            why="a step that is not finite would ruin the weights; it was not made",
            fix="resume with a lower optimizer.learning_rate, or set training.on_bad_loss = skip or rewind"
            if policy == "stop"
            else "resume from an earlier checkpoint with a lower optimizer.learning_rate, or look at the data",
        )


class _Reading:
    """Whether a step is bad, and its numbers, perhaps still on their way from the device."""

    def __init__(self, is_bad: Tensor, loss: Tensor, grad_norm: Tensor) -> None:
        values = torch.stack([value.detach().to(is_bad) for value in (is_bad, loss, grad_norm)])
        self._event: torch.cuda.Event | None = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(3, pin_memory=True).copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_here(self) -> bool:
        """Whether it has been waited for: not whether it happens to have come, which ranks would see differently."""
        return self._event is None

    @property
    def is_bad(self) -> bool:
        return bool(self._values[0])

    @property
    def loss(self) -> float:
        return self._values[1].item()

    @property
    def grad_norm(self) -> float:
        return self._values[2].item()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
            self._event = None
