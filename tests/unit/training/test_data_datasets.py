"""Folders written by the `datasets` library, where it is installed; a clear error where it is not."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from shardwise.config.run import DataConfig
from shardwise.errors import ConfigError, EnvironmentProblem
from tests.unit.training.data_files import open_some

installed = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")


def save(folder: Path, rows: list[dict], split: str | None = None) -> str:
    import datasets  # pyrefly: ignore[missing-import]

    made = datasets.Dataset.from_list(rows)
    (datasets.DatasetDict({split: made}) if split else made).save_to_disk(str(folder))
    return str(folder)


@installed
@pytest.mark.parametrize("pack", [True, False])
def test_rows_of_a_saved_dataset_are_documents(tmp_path: Path, pack: bool):
    source = save(tmp_path / "saved", [{"prompt": "ab", "response": text} for text in ("cd", "ef")])
    with open_some(DataConfig(source=source, sequence_length=4, shuffle=False, pack=pack), batch_size=2) as loader:
        batch = next(loader)
    assert batch["input_ids"].tolist() == [[*b"abcd"], [*b"abef"]]
    assert batch["labels"].tolist() == [[-100, *b"cd", 256], [-100, *b"ef", 256]]


@installed
def test_a_row_without_the_field_is_named(tmp_path: Path):
    source = save(tmp_path / "saved", [{"body": "text"}])
    with pytest.raises(ConfigError, match="no field 'text'") as failure:
        open_some(DataConfig(source=source))
    assert failure.value.where.startswith(f"{source}[0]: ")


@installed
def test_other_rows_are_other_data(tmp_path: Path):
    digests = []
    for name, text in (("a", "some text"), ("b", "same text"), ("c", "some text")):
        with open_some(DataConfig(source=save(tmp_path / name, [{"text": text}] * 9), sequence_length=4)) as loader:
            digests.append(loader.fingerprint["source"])
    assert digests[0] == digests[2] != digests[1]


@installed
def test_a_split_has_to_be_chosen(tmp_path: Path):
    source = save(tmp_path / "saved", [{"text": "text"}] * 9, split="train")
    with pytest.raises(ConfigError, match="several splits: train") as failure:
        open_some(DataConfig(source=source))
    assert failure.value.fix == f"set data.source = {source}/train"
    with open_some(DataConfig(source=f"{source}/train", sequence_length=4)) as loader:
        assert loader.num_samples == 11


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="datasets is installed")
def test_without_the_library_a_saved_dataset_is_refused(tmp_path: Path):
    (tmp_path / "dataset_info.json").write_text(json.dumps({}))
    with pytest.raises(EnvironmentProblem, match="datasets is not installed") as failure:
        open_some(DataConfig(source=str(tmp_path)))
    assert "pip install datasets" in failure.value.fix
