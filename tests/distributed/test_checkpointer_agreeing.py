"""Ranks that save or load together: whose error is raised where, and what is kept of values that differ."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import Checkpointer, load_weights, save_weights
from shardwise.errors import CheckpointError, ConfigError
from tests.by_hand import full, mesh_1d, shard_by_hand, tiny
from tests.ranks import ranks


class Kept:
    """Anything with a state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@ranks(2)
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_an_error_is_ones_own_or_that_of_the_rank_it_names(rank: int, bad_rank: int, tmp_path: Path):
    model = shard_by_hand(tiny(), mesh_1d(2))
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(3))] if rank == bad_rank else trainable(model), lr=0.1)
    told = "1 of 1 parameters are not parameters of the saved models: (3,)"
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError) as caught:
            checkpointer.save(1, model=model, optimizers=foreign)
        assert caught.value.what == (told if rank == bad_rank else f"rank {bad_rank}: {told}")
        with pytest.raises(CheckpointError) as odd:
            checkpointer.save(3 + rank, model=model)
        assert odd.value.what == "ranks save different steps: [3, 4]"
        assert checkpointer.latest() is None
        checkpointer.save(5, model=model)
        checkpointer.wait()
        assert checkpointer.latest() == 5
        with pytest.raises(ConfigError) as refused:
            checkpointer.load(model=model, data=object() if rank == bad_rank else Kept({}))
        assert refused.value.what.startswith(f"rank {bad_rank}: ") == (rank != bad_rank)


@ranks(2)
def test_an_error_that_is_none_of_ours_travels_in_words(rank: int, tmp_path: Path):
    class Breaking(Kept):
        def state_dict(self) -> dict[str, Any]:
            if rank == 1:
                raise LookupError("no state today")
            return self.state

    model = shard_by_hand(tiny(), mesh_1d(2))
    with Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        if rank == 1:
            with pytest.raises(LookupError, match="no state today"):
                checkpointer.save(1, model=model, data=Breaking({}))
        else:
            with pytest.raises(CheckpointError) as caught:
                checkpointer.save(1, model=model, data=Breaking({}))
            assert caught.value.what == "rank 1: LookupError: no state today"
    assert [name for name in os.listdir(tmp_path) if not name.endswith(".partial")] == []


@ranks(2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_values_of_each_rank_are_its_own_and_equal_ones_are_kept_once(rank: int, tmp_path: Path, asynchronous: bool):
    model = shard_by_hand(tiny(), mesh_1d(2))
    own = {"seen": 10 + rank, "same": "x", "where": torch.full((2,), float(rank)), "table": torch.arange(3)}
    with Checkpointer(tmp_path, asynchronous=asynchronous) as checkpointer:
        checkpointer.save(1, model=model, data=Kept(own), extra={"epoch": 2})
        found = Kept({})
        assert checkpointer.load(model=model, data=found) == 1
        assert checkpointer.extra == {"epoch": 2}
    assert (found.state["seen"], found.state["same"]) == (10 + rank, "x")
    assert found.state["where"].tolist() == [rank, rank]
    assert found.state["table"].tolist() == [0, 1, 2]


@ranks(2)
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_weights_that_one_rank_cannot_read_are_loaded_by_none(rank: int, bad_rank: int, tmp_path: Path):
    model = shard_by_hand(tiny(), mesh_1d(2))
    save_weights(model, tmp_path / "w.safetensors")
    other = shard_by_hand(tiny(seed=3), mesh_1d(2))
    before = {name: full(parameter).clone() for name, parameter in other.named_parameters()}
    path = tmp_path / ("absent.safetensors" if rank == bad_rank else "w.safetensors")
    with pytest.raises(CheckpointError):
        load_weights(other, path)
    assert all(torch.equal(full(parameter), before[name]) for name, parameter in other.named_parameters())
    load_weights(other, tmp_path / "w.safetensors")
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(full(ours), full(theirs))


@ranks(2)
def test_weights_are_not_written_over_by_any_rank(rank: int, tmp_path: Path):
    model = shard_by_hand(tiny(), mesh_1d(2))
    save_weights(model, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="is there already"):
        save_weights(model, tmp_path / "w.safetensors")
    save_weights(model, tmp_path / "w.safetensors", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["w.safetensors"]
