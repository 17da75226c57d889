"""Held-out data: every sample once, as many batches on each rank, none of it trained on."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.config.run import DataConfig
from shardwise.errors import ConfigError
from shardwise.training.data import Evaluation, open_evaluation
from shardwise.training.data.loader import Share
from tests.unit.training.data_files import numbered, open_some, samples_in


def evaluation(config: DataConfig, rank: int = 0, num_ranks: int = 1, batch_size: int = 4, **more) -> Evaluation:
    opened = open_evaluation(
        config, batch_size=batch_size, rank=rank, num_ranks=num_ranks, vocab_size=None, device="cpu", **more
    )
    assert opened is not None
    return opened


def counted(batches: Evaluation) -> list[int]:
    """Samples of rows of which something is learnt."""
    return [
        sample
        for batch in batches
        for sample, labels in zip(samples_in(batch), batch["labels"], strict=True)
        if bool((labels != -100).any())
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_held_out", [1, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("workers", [0, 1])
def test_every_sample_counts_once_on_any_number_of_ranks(
    tmp_path: Path, num_ranks: int, num_held_out: int, workers: int
):
    (tmp_path / "held").mkdir()
    held = numbered(tmp_path / "held", num_held_out)
    config = replace(numbered(tmp_path, 20), evaluation=held.source, workers=workers)
    parts = [evaluation(config, rank, num_ranks) for rank in range(num_ranks)]
    assert {len(part) for part in parts} == {-(-num_held_out // 4)}
    assert {sum(1 for _ in part) for part in parts} == {len(parts[0])}
    assert {len(batch["labels"]) for part in parts for batch in part} == {4 // num_ranks}
    assert sorted(sample for part in parts for sample in counted(part)) == list(range(num_held_out))


def test_the_held_out_part_is_the_end_and_is_not_trained_on(tmp_path: Path):
    config = numbered(tmp_path, 20, evaluation_fraction=0.25)
    with open_some(config, batch_size=5) as loader:
        assert loader.num_samples == 15
        trained = {sample for _ in range(6) for sample in samples_in(next(loader))}
        held_out = counted(evaluation(config, training=loader))
    assert trained == set(range(15))
    assert held_out == counted(evaluation(config)) == list(range(15, 20))


def test_nothing_is_held_out_unless_asked(tmp_path: Path):
    config = numbered(tmp_path, 20)
    opened = open_evaluation(config, batch_size=4, rank=0, num_ranks=1, vocab_size=None, device="cpu")
    assert opened is None


def test_it_can_be_gone_through_again_and_left_halfway(tmp_path: Path):
    config = numbered(tmp_path, 40, evaluation_fraction=0.5)
    held_out = evaluation(config)
    assert counted(held_out) == counted(held_out)
    batches = iter(held_out)
    next(batches)
    assert [thread for thread in threading.enumerate() if thread.name.startswith("shardwise-data")]
    del batches
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shardwise-data")]


def test_missing_held_out_data_is_named_by_its_setting(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"data\.evaluation match no data"):
        evaluation(numbered(tmp_path, 20, evaluation=str(tmp_path / "no.bin")))


class Broken:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, object]:
        if index == 7:
            raise OSError("item 7 cannot be read")
        return {"input_ids": torch.tensor([index])}


def broken(config: DataConfig) -> Broken:
    return Broken()


def test_an_error_in_held_out_data_comes_out():
    held_out = evaluation(DataConfig(source="python", evaluation=f"{__name__}:broken"))
    with pytest.raises(OSError, match="item 7 cannot be read"):
        list(held_out)


class Unlabelled:
    def __init__(self, num: int) -> None:
        self._num = num

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"input_ids": torch.tensor([index * 4]), "pixels": torch.ones(2, 2)}


def ten(config: DataConfig) -> Unlabelled:
    return Unlabelled(10)


def two(config: DataConfig) -> Unlabelled:
    return Unlabelled(2)


def test_without_labels_the_last_batch_is_smaller(tmp_path: Path):
    """There is no label to ignore: what ranks cannot share is left out, and nobody waits."""
    config = DataConfig(evaluation=f"{__name__}:ten")
    parts = [evaluation(config, rank, 4, batch_size=4) for rank in range(4)]
    assert [len(part) for part in parts] == [2] * 4
    assert sorted(s for part in parts for batch in part for s in samples_in(batch)) == list(range(8))
    parts = [evaluation(config, rank, 2, batch_size=8) for rank in range(2)]
    assert [[samples_in(batch) for batch in part] for part in parts] == [[[0, 1, 2, 3], [8]], [[4, 5, 6, 7], [9]]]


def test_fewer_samples_without_labels_than_ranks_are_refused():
    with pytest.raises(ConfigError, match="2 held-out sample"):
        evaluation(DataConfig(evaluation=f"{__name__}:two"), 0, 4)


class Rows:
    """Samples whose labels have a given shape and dtype."""

    num_samples = 5

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def batch(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        labels = rows.to(self.dtype).view(-1, *[1] * len(self.shape)).expand(-1, *self.shape)
        return {"pixels": rows.to(torch.float32), "labels": labels}


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_the_last_batch_is_filled_up_whatever_the_shape_of_labels(shape: tuple[int, ...]):
    held_out = Evaluation(
        Rows(shape, torch.int64), 0, Share(batch_size=4, rank=0, num_ranks=1, device="cpu"), workers=0
    )
    first, last = held_out
    assert first["labels"].shape == last["labels"].shape == (4, *shape)
    assert last["labels"].view(4, -1).unique(dim=1).flatten().tolist() == [4, -100, -100, -100]


def test_numbers_as_labels_are_never_replaced():
    held_out = Evaluation(Rows((), torch.float32), 0, Share(batch_size=4, rank=0, num_ranks=1, device="cpu"), workers=0)
    assert [batch["labels"].tolist() for batch in held_out] == [[0, 1, 2, 3], [4]]
