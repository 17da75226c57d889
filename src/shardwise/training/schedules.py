"""Learning-rate schedules: pure functions of the step, so that a resumed run continues exactly."""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer

from shardwise.config.load import check_ranges
from shardwise.config.run import ScheduleConfig
from shardwise.errors import ConfigError

_WSD_PART = 5
"""Without `decay_steps`, `wsd` decays in the last fifth of the run."""


def learning_rate_factor(config: ScheduleConfig, total_steps: int, step: int) -> float:
    """Return the factor of the peak learning rate in a step, from 0; steps after the last one keep its factor.

    During warm-up the factor is `(step + 1) / (warmup_steps + 1)`, so that no step has learning rate 0 and step
    `warmup_steps` has the peak. Then it decays to `final_ratio` in the last step. `wsd` stays at the peak until
    `decay_steps` before the end and then decays linearly.
    """
    step = min(step, total_steps - 1)
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.name == "constant":
        return 1.0
    if config.name == "wsd":
        fifth = min(max(1, total_steps // _WSD_PART), max(0, total_steps - config.warmup_steps))
        decay = fifth if config.decay_steps is None else config.decay_steps
        decayed = max(0, step - (total_steps - decay) + 1) / max(1, decay)
    else:
        decayed = (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps)
    if config.name == "cosine":
        decayed = (1 - math.cos(math.pi * decayed)) / 2
    return 1.0 - decayed * (1.0 - config.final_ratio)


class Schedule:
    """Sets the learning rates of an optimizer's groups, each relative to its peak.

    Args:
        optimizer: The `lr` of its groups are the peaks.
        config: The schedule.
        total_steps: Steps of the whole run, including those before a resume.

    Raises:
        ConfigError: A setting is out of range.

    Ranks:
        Local. Ranks that have made the same number of steps have the same learning rates.
    """

    def __init__(self, optimizer: Optimizer, config: ScheduleConfig, total_steps: int) -> None:
        check_ranges(config, "schedule")
        left = total_steps - config.warmup_steps
        if config.name == "wsd" and config.decay_steps is not None and not 1 <= config.decay_steps <= left:
            raise ConfigError(
                f"schedule.decay_steps is {config.decay_steps}: from 1 to the {left} steps left after the warm-up",
                where="schedule.decay_steps",
                why="the decay must fit in the run",
                fix="set it in range, or change training.steps",
            )
        self.optimizer, self.config, self.total_steps = optimizer, config, total_steps
        self.peaks = [float(group["lr"]) for group in optimizer.param_groups]
        self.steps_done = 0
        self.apply()

    @property
    def factor(self) -> float:
        """Factor of the peaks in the next optimizer step."""
        return learning_rate_factor(self.config, self.total_steps, self.steps_done)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the first group in the next optimizer step."""
        return self.peaks[0] * self.factor

    def step(self) -> None:
        """Advance by one step; call it after each optimizer step, also after a skipped one."""
        self.steps_done += 1
        self.apply()

    def apply(self) -> None:
        """Set the learning rates of the next optimizer step; call it after loading the optimizer."""
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * self.factor

    def state_dict(self) -> dict[str, Any]:
        """The number of steps; peaks and shape come from the config, which may change on resume."""
        return {"steps_done": self.steps_done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from that step."""
        self.steps_done = int(state_dict["steps_done"])
        self.apply()
