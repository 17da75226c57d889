"""The loader: the same samples on any number of ranks and threads, and a position that counts what was handed out."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch

from shardwise.config.run import DataConfig
from shardwise.errors import CheckpointError, ShardError
from shardwise.training.data.loader import Loader, Share, samples_at
from tests.unit.training.data_files import numbered, open_some, samples_in


def take(config: DataConfig, num_batches: int, **settings) -> list[list[int]]:
    with open_some(config, **settings) as loader:
        return [samples_in(next(loader)) for _ in range(num_batches)]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_threads_change_nothing_but_the_time(tmp_path: Path, workers: int):
    batches = take(numbered(tmp_path, 10, workers=workers, prefetch=3), 12)
    assert batches == take(numbered(tmp_path, 10, workers=0), 12)
    flat = [sample for batch in batches for sample in batch]
    for epoch in range(4):
        assert sorted(flat[epoch * 10 : epoch * 10 + 10]) == list(range(10))
    assert flat[:10] != flat[10:20] != list(range(10))


@pytest.mark.parametrize("first", [0, 5, 33 * 4 + 2])
def test_a_hundred_batches_are_the_positions_one_after_the_other(tmp_path: Path, first: int):
    """Also from a position that no batch of this size begins at."""
    config = numbered(tmp_path, 50)
    with open_some(config, batch_size=4, rank=1, num_ranks=2) as loader:
        loader.load_state_dict({**loader.state_dict(), "samples": first})
        batches = [samples_in(next(loader)) for _ in range(100)]
    order = samples_at(torch.arange(first, first + 400), 50, seed=0, shuffle=True)
    assert batches == order.view(100, 4)[:, 2:].tolist()


def test_without_shuffling_samples_come_as_they_lie(tmp_path: Path):
    assert take(numbered(tmp_path, 6, shuffle=False), 3) == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])
def test_ranks_share_the_batch_of_one_process(tmp_path: Path, num_ranks: int):
    config = numbered(tmp_path, 31)
    alone = take(config, 8, batch_size=12)
    parts = [take(config, 8, batch_size=12, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert [[s for part in parts for s in part[step]] for step in range(8)] == alone


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (3, 1), (1, 6)])
def test_another_number_of_ranks_goes_on_with_what_was_not_seen(tmp_path: Path, before: int, after: int):
    """Half of an epoch on some ranks, the other half on others: every sample exactly once."""
    config = numbered(tmp_path, 96)
    seen, state = [], {}
    for rank in range(before):
        with open_some(config, batch_size=12, rank=rank, num_ranks=before) as loader:
            seen += [sample for _ in range(4) for sample in samples_in(next(loader))]
            state = json.loads(json.dumps(loader.state_dict()))
    for rank in range(after):
        with open_some(config, batch_size=12, rank=rank, num_ranks=after) as loader:
            loader.load_state_dict(state)
            seen += [sample for _ in range(4) for sample in samples_in(next(loader))]
    assert len(seen) == 96
    assert sorted(seen) == list(range(96))


def test_position_is_of_batches_handed_out_not_of_those_made_ahead(tmp_path: Path):
    config = numbered(tmp_path, 40, workers=2, prefetch=4)
    with open_some(config) as loader:
        assert loader.state_dict()["samples"] == 0
        for step in range(1, 13):
            next(loader)
            assert loader.state_dict()["samples"] == step * 4
            assert loader.state_dict()["epoch"] == loader.epoch == step * 4 // 40
        expected = [samples_in(next(loader)) for _ in range(3)]
    with open_some(config) as other:
        next(other)
        other.load_state_dict({**loader.state_dict(), "samples": 48})
        assert [samples_in(next(other)) for _ in range(3)] == expected


def test_a_changed_batch_size_goes_on_at_the_same_sample(tmp_path: Path):
    config = numbered(tmp_path, 24)
    with open_some(config, batch_size=4) as loader:
        seen = samples_in(next(loader)) + samples_in(next(loader))
        state = loader.state_dict()
    with open_some(config, batch_size=16) as loader:
        loader.load_state_dict(state)
        seen += samples_in(next(loader))
    assert sorted(seen) == list(range(24))


def test_skipping_leaves_whole_batches_out(tmp_path: Path):
    config = numbered(tmp_path, 40, workers=1)
    every = take(config, 8)
    with open_some(config) as loader:
        first = samples_in(next(loader))
        loader.skip(3)
        assert [first, samples_in(next(loader))] == [every[0], every[4]]


@pytest.mark.parametrize(
    ("changes", "seed", "named"),
    [
        ({"length": 8}, 0, "data.sequence_length: 4 then, 8 now"),
        ({"pack": False, "length": 4}, 0, "data.pack: True then, False now"),
        ({"shuffle": False}, 0, "data.shuffle: True then, False now"),
        ({"evaluation_fraction": 0.25}, 0, "data.num_samples: 16 then, 12 now"),
        ({}, 3, "seed: 0 then, 3 now"),
    ],
)
def test_state_of_other_data_is_refused(tmp_path: Path, changes: dict, seed: int, named: str):
    with open_some(numbered(tmp_path, 16)) as loader:
        state = loader.state_dict()
    with open_some(numbered(tmp_path, 16, **changes), seed=seed) as other:
        with pytest.raises(CheckpointError, match="other data") as failure:
            other.load_state_dict(state)
        assert named in failure.value.where.splitlines()
        assert other.state_dict()["samples"] == 0


def test_state_of_changed_files_is_refused(tmp_path: Path):
    with open_some(numbered(tmp_path, 16)) as loader:
        state = loader.state_dict()
    config = numbered(tmp_path, 16)
    path = Path(str(config.source))
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with open_some(config) as other, pytest.raises(CheckpointError, match=r"data\.source: \w+ then, \w+ now"):
        other.load_state_dict(state)


def test_state_without_a_fingerprint_is_refused(tmp_path: Path):
    with open_some(numbered(tmp_path, 16)) as loader, pytest.raises(CheckpointError, match="nothing then"):
        loader.load_state_dict({"samples": 4, "seed": 0, "shuffle": True})


class Slow:
    """Samples that take a while, and count who asks for them."""

    def __init__(self, seconds: float, num_samples: int = 64) -> None:
        self.num_samples, self._seconds = num_samples, seconds
        self.asked: list[int] = []
        self.broken: set[int] = set()
        self.inside: set[int] = set()
        self.most_inside = 0

    def batch(self, indices: torch.Tensor) -> dict[str, torch.Tensor]:
        self.inside.add(threading.get_ident())
        self.most_inside = max(self.most_inside, len(self.inside))
        time.sleep(self._seconds)
        self.inside.discard(threading.get_ident())
        self.asked += indices.tolist()
        if self.broken & set(indices.tolist()):
            raise OSError("the disk is gone")
        return {"input_ids": indices[:, None]}


def loader_of(samples: Slow, *, workers: int, prefetch: int = 2) -> Loader:
    share = Share(batch_size=4, rank=0, num_ranks=1, device="cpu")
    config = DataConfig(shuffle=False, workers=workers, prefetch=prefetch)
    return Loader(samples, share, config, num_samples=samples.num_samples, tokenizer=None, seed=0, fingerprint={})


def wait_until_asked(samples: Slow, count: int) -> None:
    deadline = time.monotonic() + 30
    while len(samples.asked) < count:
        assert time.monotonic() < deadline, "nobody makes it"
        time.sleep(0.001)


def test_batches_are_made_while_the_step_computes():
    """A step that lasts as long as the next batch takes: after the first, none is waited for."""
    samples = Slow(0.015)
    with loader_of(samples, workers=1) as ahead:
        next(ahead)
        assert ahead.take_wait_s() >= 0.015
        for step in range(8):
            wait_until_asked(samples, 4 * (step + 2))
            next(ahead)
        hidden = ahead.take_wait_s()
        assert ahead.take_wait_s() == 0.0, "reading it starts it anew"
    with loader_of(Slow(0.015), workers=0) as behind:
        for _ in range(8):
            next(behind)
        assert behind.take_wait_s() >= 8 * 0.015
    assert hidden < 8 * 0.015 / 2


def test_several_workers_make_batches_at_once():
    samples = Slow(0.05)
    with loader_of(samples, workers=4) as loader:
        order = [next(loader)["input_ids"][0, 0].item() for _ in range(8)]
    assert 2 <= samples.most_inside <= 4
    assert order == [0, 4, 8, 12, 16, 20, 24, 28]


def test_no_more_is_made_ahead_than_asked_for():
    samples = Slow(0.0)
    with loader_of(samples, workers=1, prefetch=3) as loader:
        next(loader)
        wait_until_asked(samples, 4 * (1 + 3))
        time.sleep(0.1)
        assert len(samples.asked) == 4 * (1 + 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_is_raised_where_its_batch_would_have_come(workers: int):
    samples = Slow(0.001)
    samples.broken = {9}
    with loader_of(samples, workers=workers) as loader:
        assert [next(loader)["input_ids"][0, 0].item() for _ in range(2)] == [0, 4]
        for _ in range(2):  # the position has not moved
            with pytest.raises(OSError, match="the disk is gone") as failure:
                next(loader)
            assert failure.value.__notes__ == ["(while making the batch of samples 8 to 11)"]
            assert loader.state_dict()["samples"] == 8
        samples.broken = set()
        assert next(loader)["input_ids"][0, 0].item() == 8, "and what was mended is handed out"


def test_closing_ends_the_threads_and_hands_out_nothing_more():
    loader = loader_of(Slow(0.01), workers=3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shardwise-data")]
    next(loader)
    assert [thread for thread in threading.enumerate() if thread.name.startswith("shardwise-data")]
    loader.close()
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shardwise-data")]
    with pytest.raises(ShardError, match="closed"):
        next(loader)
