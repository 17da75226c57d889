"""All generators continue where they were; ranks that had none get their own, the same each time."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from shardwise.checkpointing.state import encoded_random_state, seed_from_state, set_encoded_random_state
from shardwise.errors import CheckpointError


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(numpy.random.rand()),
        float(numpy.random.randn()),
        torch.rand(1).item(),
    ]


def test_generators_go_on():
    random.gauss(0, 1)  # Python and NumPy keep the second of a pair for later
    numpy.random.randn()
    state = encoded_random_state()
    expected = draw()
    assert draw() != expected
    set_encoded_random_state(state)
    assert draw() == expected


def test_states_are_copies():
    state = encoded_random_state()
    before = {name: tensor.clone() for name, tensor in state.items()}
    draw()
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())


def test_derived_seeds_differ_by_rank_and_by_nothing_else():
    state = encoded_random_state()
    drawn = {}
    for rank in (1, 2, 3, 1000):
        seed_from_state(state, rank)
        drawn[rank] = draw()
        draw()
        seed_from_state(state, rank)
        assert draw() == drawn[rank]
    each = list(zip(*drawn.values(), strict=True))
    assert all(len(set(values)) == 4 for values in each)


@pytest.mark.parametrize("name", ["torch", "python", "numpy"])
def test_damaged_states_are_refused(name: str):
    with pytest.raises(CheckpointError, match=f"random state of {name}"):
        set_encoded_random_state({name: torch.zeros(7, dtype=torch.uint8)})
