"""`module:callable` as data: texts, records, or samples ready for the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwise.config.run import DataConfig
from shardwise.errors import ConfigError
from tests.unit.training.data_files import open_some


def texts(config: DataConfig) -> list[str]:
    return ["one text", "another"] * config.sequence_length


def pairs(config: DataConfig) -> list[dict[str, str]]:
    return [{"question": "ab", "answer": "cd"}] * 3


def pictures(config: DataConfig) -> list[dict[str, torch.Tensor]]:
    return [{"pixels": torch.full((3, 2), float(index)), "labels": torch.tensor([index])} for index in range(6)]


def ragged(config: DataConfig) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.arange(index + 1)} for index in range(6)]


class Padding:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(index + 1)}

    def collate(self, items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.nn.utils.rnn.pad_sequence([item["input_ids"] for item in items], batch_first=True)}


def padding(config: DataConfig) -> Padding:
    return Padding()


def endless(config: DataConfig):
    yield "text"


def pair_of_tensors(config: DataConfig) -> list[tuple[int, int]]:
    return [(1, 2)]


def unreadable(config: DataConfig) -> list[str]:
    return [Path("/nowhere/at all").read_text()]


def nothing(config: DataConfig) -> list[str]:
    return []


def named(name: str, **settings) -> DataConfig:
    return DataConfig(source=f"{__name__}:{name}", sequence_length=4, shuffle=False, **settings)


def test_texts_are_tokenised_and_packed():
    with open_some(named("texts"), batch_size=4, vocab_size=257) as loader:
        assert loader.tokenizer.decode(next(loader)["input_ids"].flatten().tolist()) == "one textanother"


def test_records_use_the_names_of_the_config():
    config = named("pairs", prompt_field="question", response_field="answer", pack=False)
    with open_some(config, batch_size=1) as loader:
        assert next(loader)["labels"].tolist() == [[-100, *b"cd", 256]]


def test_samples_of_tensors_are_stacked_as_they_are():
    with open_some(named("pictures"), batch_size=4, rank=1, num_ranks=2) as loader:
        batch = next(loader)
        assert loader.tokenizer is None
    assert batch["pixels"].shape == (2, 3, 2)
    assert batch["labels"].tolist() == [[2], [3]]


def test_ragged_samples_need_a_collate_of_their_own():
    with open_some(named("ragged")) as loader, pytest.raises(ConfigError, match="cannot be collated") as failure:
        next(loader)
    assert "collate" in failure.value.fix
    with open_some(named("padding"), batch_size=3) as loader:
        assert next(loader)["input_ids"].tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 2]]


def test_ready_samples_are_held_against_the_vocabulary():
    message = "holds token 5, the model has 0 to 4"
    with open_some(named("padding"), batch_size=6, vocab_size=5) as loader, pytest.raises(ConfigError, match=message):
        next(loader)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("endless", "returned a generator, which has no length and items"),
        ("pair_of_tensors", "neither text nor a sample"),
        ("pairs", "neither text nor a sample"),
        ("nothing", "the data is empty"),
        ("unreadable", "cannot read /nowhere/at all: no such file or directory"),
        ("missing", "there is no callable"),
    ],
)
def test_what_cannot_be_data_is_refused(name: str, message: str):
    with pytest.raises(ConfigError, match=message):
        open_some(named(name))
