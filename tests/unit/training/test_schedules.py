"""Learning rates by step: known values, limits, and a resume that changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config.run import ScheduleConfig
from shardwise.errors import ConfigError
from shardwise.training.schedules import Schedule, learning_rate_factor


def factors(total: int, **settings: object) -> list[float]:
    config = ScheduleConfig(**settings)
    return [learning_rate_factor(config, total, step) for step in range(total)]


def test_known_values():
    assert factors(6, name="constant", warmup_steps=2) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1])
    assert factors(6, name="linear", warmup_steps=1, final_ratio=0.2) == pytest.approx([0.5, 1, 0.8, 0.6, 0.4, 0.2])
    cosine = [0.5 + 0.5 * math.cos(math.pi * k / 4) for k in range(5)]
    assert factors(5, name="cosine", warmup_steps=0, final_ratio=0.0) == pytest.approx(cosine)
    stable = [0.5, 1, 1, 1, 1, 1, 2 / 3, 1 / 3, 0]
    assert factors(9, name="wsd", warmup_steps=1, decay_steps=3, final_ratio=0.0) == pytest.approx(stable)
    fifth = factors(10, name="wsd", warmup_steps=0, final_ratio=0.5)
    assert fifth == pytest.approx([1] * 8 + [0.75, 0.5])


SETTINGS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["constant", "cosine", "linear", "wsd"]),
        "warmup_steps": st.integers(0, 30),
        "final_ratio": st.floats(0, 1),
    }
)


@given(SETTINGS, st.integers(1, 60))
def test_rises_then_falls_to_the_final_ratio(settings: dict, total: int):
    config = ScheduleConfig(**settings)
    values = [learning_rate_factor(config, total, step) for step in range(total + 5)]
    warm, rest = values[: min(total, config.warmup_steps)], values[config.warmup_steps : total]
    assert warm == sorted(warm)
    assert rest == sorted(rest, reverse=True)
    assert all(0 <= value <= 1 + 1e-12 for value in values)
    assert all(value > 0 for value in warm)
    assert values[total:] == [values[total - 1]] * 5
    if len(rest) > 1 and config.name != "constant":
        assert rest[-1] == pytest.approx(config.final_ratio)


def optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (1.0, 0.1)]
    return torch.optim.SGD(groups, lr=9.0)


def test_groups_keep_their_ratio_and_a_resume_goes_on():
    config = ScheduleConfig(name="cosine", warmup_steps=3)
    whole = optimizer()
    schedule = Schedule(whole, config, 20)
    seen = []
    for _ in range(20):
        assert whole.param_groups[0]["lr"] == pytest.approx(10 * whole.param_groups[1]["lr"])
        assert whole.param_groups[0]["lr"] == schedule.learning_rate
        seen.append(schedule.learning_rate)
        schedule.step()
    first = Schedule(optimizer(), config, 20)
    for _ in range(7):
        first.step()
    later = optimizer()
    second = Schedule(later, config, 20)
    second.load_state_dict(first.state_dict())
    for group in later.param_groups:
        group["lr"] = 123.0  # what loading an optimizer may do
    second.apply()
    resumed = []
    for _ in range(13):
        resumed.append(later.param_groups[0]["lr"])
        second.step()
    assert resumed == seen[7:]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": -1, "final_ratio": 1.5}, r"warmup_steps: .* got -1\s+schedule.final_ratio: .* got 1.5"),
        ({"name": "wsd", "decay_steps": 0}, "decay_steps is 0"),
        ({"name": "wsd", "decay_steps": 15, "warmup_steps": 10}, "decay_steps is 15"),
    ],
)
def test_settings_out_of_range(settings: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        Schedule(optimizer(), ScheduleConfig(**settings), 20)
