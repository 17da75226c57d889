"""A step that is not finite never reaches the weights, and the policy is kept."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from shardwise.config.run import TrainingConfig
from shardwise.errors import TrainingError
from shardwise.training.metrics import StepReading
from shardwise.training.objective import BadLosses, allows_step

BAD = [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)]


def reading(step: int, loss: float = math.nan, norm: float = 1.0) -> StepReading:
    return StepReading(step=step, loss=loss, grad_norm=norm, tokens=1, seconds=1.0)


@pytest.mark.parametrize(("loss", "norm"), [*BAD, (1.0, 1.0)])
def test_bad_steps_are_not_allowed(loss: float, norm: float):
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    allowed = allows_step(optimizer, torch.tensor(loss), torch.tensor(norm))
    assert allowed == math.isfinite(loss + norm)


@pytest.mark.parametrize(("loss", "norm"), BAD)
@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_bad_steps_are_counted(loss: float, norm: float, policy: str):
    bad = BadLosses(TrainingConfig(on_bad_loss=policy))
    assert not bad.is_bad(reading(1, 1.0))
    assert bad.is_bad(reading(2, loss, norm))
    assert bad.num_bad == 1


@pytest.mark.parametrize(("loss", "norm"), BAD)
def test_stop(loss: float, norm: float):
    bad = BadLosses(TrainingConfig(on_bad_loss="stop"))
    with pytest.raises(TrainingError, match=rf"step 7 has loss {loss:g} and gradient norm {norm:g}") as caught:
        bad.is_bad(reading(7, loss, norm))
    assert caught.value.exit_code == 1


def test_too_many():
    bad = BadLosses(TrainingConfig(on_bad_loss="skip", max_bad_steps=2))
    assert all(bad.is_bad(reading(step)) for step in (1, 2))
    resumed = BadLosses(TrainingConfig(on_bad_loss="skip", max_bad_steps=2))
    resumed.load_state_dict(bad.state_dict())
    with pytest.raises(TrainingError, match=r"bad step 3 of this run(.|\n)*max_bad_steps"):
        resumed.is_bad(reading(3))


def test_going_back_does_not_forget_the_count():
    bad = BadLosses(TrainingConfig(on_bad_loss="rewind"))
    bad.is_bad(reading(1))
    bad.load_state_dict({"num_bad": 0})
    assert bad.num_bad == 1
