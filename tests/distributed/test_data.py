"""Data on real ranks: every sample once across a change of the number of ranks, and nobody left waiting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.config.run import DataConfig
from shardwise.distributed.agreement import raise_on_all_ranks
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.training.data import Loader, open_evaluation
from shardwise.training.step import lockstep
from tests.ranks import ranks
from tests.unit.training.data_files import numbered, open_some, samples_in


def all_ranks(value: object) -> list:
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@pytest.fixture
def many(tmp_path: Path) -> DataConfig:
    return numbered(tmp_path, 96, workers=2)


@ranks(4)
def test_two_ranks_and_then_four_see_every_sample_once(rank: int, many: DataConfig):
    seen: list[int] = []
    state: dict = {}
    if rank < 2:
        with open_some(many, batch_size=8, rank=rank, num_ranks=2) as loader:
            seen += [sample for _ in range(6) for sample in samples_in(next(loader))]
            state = loader.state_dict()
    states = all_ranks(state)
    assert states[0] == states[1], "the state is the same on every rank"
    with open_some(many, batch_size=8, rank=rank, num_ranks=4) as loader:
        loader.load_state_dict(states[0])
        seen += [sample for _ in range(6) for sample in samples_in(next(loader))]
        assert loader.epoch == 1
    everything = [sample for part in all_ranks(seen) for sample in part]
    assert sorted(everything) == list(range(96))


@ranks(4)
@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.08, 0.12])
def test_evaluation_has_a_collective_in_every_batch_and_nobody_waits(rank: int, many: DataConfig, fraction: float):
    config = replace(many, evaluation_fraction=fraction)
    held_out = open_evaluation(config, batch_size=8, rank=rank, num_ranks=4, vocab_size=None, device="cpu")
    assert held_out is not None
    assert held_out.num_samples == round(96 * fraction)
    counted = torch.zeros(())
    for batch in held_out:
        counted += (batch["labels"] != -100).any(1).sum()
        dist.all_reduce(torch.zeros(1))  # as the forward of a sharded model would
    dist.all_reduce(counted)
    assert counted == held_out.num_samples


def next_together(loader: Loader) -> None:
    """How a loop asks for a batch: no rank continues alone."""
    error = None
    try:
        next(loader)
    except ShardwiseError as caught:
        error = caught
    raise_on_all_ranks(error)


def items_of_which_one_is_short(config: DataConfig) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.ones(3 if number == 6 else 4, dtype=torch.long)} for number in range(8)]


@ranks(2)
def test_an_unfit_item_on_one_rank_stops_all_of_them(rank: int):
    source = f"{__name__}:{items_of_which_one_is_short.__name__}"
    config = DataConfig(source=source, shuffle=False)
    with open_some(config, batch_size=4, rank=rank, num_ranks=2) as loader:
        next_together(loader)
        with pytest.raises(ConfigError, match="cannot be collated") as failure:
            next_together(loader)  # the short item is the second rank's
        assert failure.value.what.startswith("rank 1: ") == (rank == 0)
        assert loader.state_dict()["samples"] == (8 if rank == 0 else 4)


@ranks(2)
def test_lockstep_takes_a_loader(rank: int, many: DataConfig):
    with open_some(many, rank=rank, num_ranks=2, batch_size=4) as loader:
        for step, batch in enumerate(lockstep(loader)):
            assert batch["input_ids"].shape == (2, 4)
            if step == 3:
                break
    assert all_ranks(rank) == [0, 1]
