"""`fit` on real ranks: it learns, ranks agree, and accumulation does not change what is learnt."""

from dataclasses import replace

import pytest
import torch

from shardwise.config.run import RunConfig, TrainingConfig
from shardwise.config.schema import MeshConfig
from shardwise.errors import ConfigError
from shardwise.ranks import agree_on
from shardwise.training.corpus import byte_batches, standard_library_bytes
from shardwise.training.loop import Training, fit
from tests.ranks import ranks

TINY = RunConfig(steps=6, batch_size=4, sequence_length=16)


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def start(self, total: int, label: str) -> None:
        self.events.append(("start", total, label))

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.events.append(("advance", steps))

    def finish(self, note: str = "") -> None:
        self.events.append(("finish",))


@ranks(2)
def test_loss_falls_and_is_the_same_on_every_rank(rank: int):
    recorder = Recorder()
    training = fit(TINY, progress=recorder)
    assert training.losses[-1] < training.losses[0] - 0.3
    agree_on(repr(training.losses), "the losses")
    assert training.tokens == 6 * 4 * 16 * 2
    assert recorder.events == [("start", 6, "training tutorial"), *[("advance", 1)] * 6, ("finish",)]


@ranks(2)
def test_same_seed_is_the_same_run_and_another_seed_is_not(rank: int):
    short = replace(TINY, steps=2)
    assert fit(short).losses == fit(short).losses
    assert fit(short).losses != fit(replace(short, seed=1)).losses


@ranks(2)
def test_micro_steps_of_half_the_batch_learn_the_same(rank: int):
    """Two micro-batches of 2 hold the same passages as one batch of 4: the generator goes on where it was."""
    whole = fit(replace(TINY, steps=3))
    halves = fit(replace(TINY, steps=3, batch_size=2, micro_steps=2))
    torch.testing.assert_close(torch.tensor(whole.losses), torch.tensor(halves.losses), rtol=1e-3, atol=1e-4)
    assert whole.tokens == halves.tokens


@ranks(4)
def test_hybrid_mesh_learns_what_the_flat_one_does(rank: int):
    flat = fit(replace(TINY, steps=3))
    hybrid = fit(replace(TINY, steps=3, mesh=MeshConfig(replicate=2)))
    torch.testing.assert_close(torch.tensor(flat.losses), torch.tensor(hybrid.losses), rtol=1e-3, atol=1e-4)


@ranks(2)
def test_sequence_longer_than_the_model_is_refused_before_anything_runs(rank: int):
    with pytest.raises(ConfigError, match="max_sequence_length 256, but the data has 512 tokens") as failure:
        fit(replace(TINY, sequence_length=512))
    assert failure.value.fix.endswith("or set sequence_length = 256")


def test_ranks_and_seeds_draw_passages_of_their_own():
    def first(seed: int, rank: int) -> torch.Tensor:
        return next(byte_batches(batch_size=4, sequence_length=8, seed=seed, rank=rank))

    assert first(0, 0).shape == (4, 9)
    assert torch.equal(first(0, 0), first(0, 0))
    assert not torch.equal(first(0, 0), first(0, 1))
    assert not torch.equal(first(0, 1), first(1, 0))
    assert len(standard_library_bytes()) > 100_000


def test_summary_reads_as_a_sentence():
    training = Training(model="tutorial", num_params=892_000, num_ranks=1, losses=(5.5, 2.25), tokens=4000, seconds=2.0)
    expected = "trained tutorial (892k parameters) on 1 rank: loss 5.500 -> 2.250 in 2 steps, 2 s, 2k tokens/s"
    assert str(training) == expected
