"""A step that is not finite never reaches the weights, and the policy is kept."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from shardwise.config.run import TrainingConfig
from shardwise.errors import TrainingError
from shardwise.training.objective import BadLosses, BadStep

GOOD = torch.tensor(1.0)
BAD = [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)]


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW(nn.Linear(2, 2).parameters())


@pytest.mark.parametrize(("loss", "norm"), BAD)
@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_bad_steps_are_not_allowed_and_named(loss: float, norm: float, policy: str):
    bad = BadLosses(TrainingConfig(on_bad_loss=policy))
    assert bad.allows(optimizer(), 1, GOOD, GOOD)
    assert bad.verdict() is None
    assert not bad.allows(optimizer(), 2, torch.tensor(loss), torch.tensor(norm))
    assert bad.verdict() == BadStep(2, policy)
    assert bad.verdict() is None
    assert bad.num_bad == 1


@pytest.mark.parametrize(("loss", "norm"), BAD)
def test_stop(loss: float, norm: float):
    bad = BadLosses(TrainingConfig(on_bad_loss="stop"))
    assert not bad.allows(optimizer(), 7, torch.tensor(loss), torch.tensor(norm))
    with pytest.raises(TrainingError, match=rf"step 7 has loss {loss:g} and gradient norm {norm:g}") as caught:
        bad.verdict()
    assert caught.value.exit_code == 1


def test_too_many():
    bad = BadLosses(TrainingConfig(on_bad_loss="skip", max_bad_steps=2))
    for step in (1, 2):
        bad.allows(optimizer(), step, torch.tensor(math.nan), GOOD)
        assert bad.verdict() == BadStep(step, "skip")
    resumed = BadLosses(TrainingConfig(on_bad_loss="skip", max_bad_steps=2))
    resumed.load_state_dict(bad.state_dict())
    resumed.allows(optimizer(), 3, torch.tensor(math.nan), GOOD)
    with pytest.raises(TrainingError, match=r"bad step 3 of this run(.|\n)*max_bad_steps"):
        resumed.verdict()


def test_going_back_does_not_forget_the_count():
    bad = BadLosses(TrainingConfig(on_bad_loss="rewind"))
    bad.allows(optimizer(), 1, torch.tensor(math.nan), GOOD)
    bad.verdict()
    bad.load_state_dict({"num_bad": 0})
    assert bad.num_bad == 1
