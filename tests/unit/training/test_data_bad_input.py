"""Wrong data is refused with one error that says what, where and what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.config.run import DataConfig
from shardwise.errors import ConfigError
from tests.unit.training.data_files import open_some, save_tokenizer, write_lines, write_tokens


def refusal(config: DataConfig, **settings) -> ConfigError:
    with pytest.raises(ConfigError) as failure:
        open_some(config, **settings)
    assert failure.value.fix
    return failure.value


def test_missing_data(tmp_path: Path):
    error = refusal(DataConfig(source=str(tmp_path / "nothing.txt")))
    assert "nothing.txt: there is no such file" in error.where


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.bin"])
@pytest.mark.parametrize("pack", [True, False])
def test_empty_data(tmp_path: Path, name: str, pack: bool):
    (tmp_path / name).touch()
    assert refusal(DataConfig(source=str(tmp_path / name), pack=pack)).what == "the data is empty"


def test_data_shorter_than_a_sequence(tmp_path: Path):
    (tmp_path / "a.txt").write_text("x" * 99)
    config = DataConfig(source=str(tmp_path), sequence_length=100)
    error = refusal(config)
    assert error.what == "the data has 100 tokens, too few for one sequence of 100"
    assert "data.sequence_length = 99 or less" in error.fix
    with open_some(replace(config, sequence_length=99)) as loader:
        assert loader.num_samples == 1


@pytest.mark.parametrize("pack", [True, False])
def test_unreadable_lines_are_all_named(tmp_path: Path, pack: bool):
    lines = ['{"text": "fine"}', "{broken", "", '["list"]', '{"body": "x", "id": 3}', '{"text": 5}', '{"prompt": "x"}']
    source = write_lines(tmp_path / "a.jsonl", lines)
    error = refusal(DataConfig(source=source, pack=pack))
    assert error.what == "5 record(s) of the data cannot be read"
    assert error.where.splitlines() == [
        f"{source}:2: not JSON: Expecting property name enclosed in double quotes (column 2)",
        f"{source}:4: a list, not an object with fields",
        f"{source}:5: no field 'text', nor 'prompt' with 'response'; its fields: body, id",
        f"{source}:6: field 'text' holds a int, not a string",
        f"{source}:7: no field 'text', nor 'prompt' with 'response'; its fields: prompt",
    ]


def test_many_unreadable_lines_are_counted(tmp_path: Path):
    error = refusal(DataConfig(source=write_lines(tmp_path / "a.jsonl", ["broken"] * 1234)))
    assert error.what == "1234 record(s) of the data cannot be read"
    assert error.where.splitlines()[-1] == "... and 1224 more"


def test_lines_that_are_not_utf8(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    assert "a.jsonl:2: not UTF-8" in refusal(DataConfig(source=str(tmp_path))).where


def test_a_line_that_is_nested_without_end(tmp_path: Path):
    source = write_lines(tmp_path / "a.jsonl", ["[" * 200_000])
    assert refusal(DataConfig(source=source)).where == f"{source}:1: nested too deeply"


def test_files_that_are_not_text(tmp_path: Path):
    (tmp_path / "a.txt").write_text("fine " * 100)
    (tmp_path / "b.png").write_bytes(b"\x89PNG\0\0")
    error = refusal(DataConfig(source=str(tmp_path)))
    assert error.what == "1 file(s) of the data are not text"
    assert error.where == f"{tmp_path}/b.png: it has zero bytes"
    (tmp_path / "b.png").write_bytes(b"latin \xe9")
    with open_some(DataConfig(source=str(tmp_path))):
        pass  # to bytes any text is text
    folder = save_tokenizer(tmp_path / ".tokenizer", ["fine"])
    assert "b.png: 'utf-8' codec can't decode" in refusal(DataConfig(source=str(tmp_path), tokenizer=folder)).where


def test_tokens_that_are_not_whole(tmp_path: Path):
    for name, size in (("a.bin", 8), ("b.bin", 7), ("c.bin", 10)):
        (tmp_path / name).write_bytes(b"\0" * size)
    error = refusal(DataConfig(source=str(tmp_path), token_dtype="int32", sequence_length=1))
    assert error.what == "2 file(s) do not contain whole tokens"
    assert error.where == f"{tmp_path}/b.bin: 7 bytes\n{tmp_path}/c.bin: 10 bytes"


def test_tokens_that_the_model_does_not_know(tmp_path: Path):
    config = DataConfig(source=write_tokens(tmp_path / "a.bin", [1, 2, 500, 3]), sequence_length=2)
    error = refusal(config, vocab_size=500)
    assert error.what == "the data holds token 500, the model has 0 to 499"
    with open_some(config, vocab_size=501) as loader:
        assert loader.tokenizer is None, "bytes did not make token 500"
    negative = write_tokens(tmp_path / "b.bin", [1, -2, 3, 4], torch.int32)
    assert "token -2" in refusal(DataConfig(source=negative, token_dtype="int32", sequence_length=2), vocab_size=9).what


def test_a_token_that_the_first_look_missed_is_refused_when_its_turn_comes(tmp_path: Path):
    """Of a large file only parts are read when it is opened."""
    ids = torch.zeros(1 << 23, dtype=torch.int16)
    ids[100_000] = 999  # between the first window and the second
    (tmp_path / "a.bin").write_bytes(memoryview(ids.numpy()))
    config = DataConfig(source=str(tmp_path), sequence_length=1 << 12, shuffle=False)
    with open_some(config, vocab_size=300, batch_size=8) as loader:
        for _ in range(3):
            next(loader)
        with pytest.raises(ConfigError, match="token 999, the model has 0 to 299"):
            next(loader)


def test_a_tokenizer_that_did_not_make_the_tokens(tmp_path: Path):
    folder = save_tokenizer(tmp_path / "tokenizer", ["x"], vocab_size=270)
    source = write_tokens(tmp_path / "a.bin", [5, 5000, 5])
    error = refusal(DataConfig(source=source, tokenizer=folder, sequence_length=1))
    assert "the data holds token 5000, the tokenizer makes only 0 to" in error.what


def test_a_tokenizer_that_disagrees_with_the_model(tmp_path: Path):
    (tmp_path / "a.txt").write_text("text " * 100)
    assert (
        "'bytes' makes 257 tokens, the model has 256" in refusal(DataConfig(source=str(tmp_path)), vocab_size=256).what
    )


def test_single_documents_of_tokens_without_ends(tmp_path: Path):
    source = write_tokens(tmp_path / "a.bin", [5, 5000, 5])
    assert "the ends of documents are unknown" in refusal(DataConfig(source=source, pack=False)).what


@pytest.mark.parametrize("pack", [True, False])
def test_prompts_that_leave_no_room(tmp_path: Path, pack: bool):
    source = write_lines(tmp_path / "a.jsonl", [{"prompt": "long prompt", "response": "x"}] * 3)
    config = DataConfig(source=source, sequence_length=8, pack=pack)
    assert "or its prompt alone fills a sequence of 8 tokens" in refusal(config).what


@pytest.mark.parametrize(("batch_size", "num_ranks", "near"), [(10, 4, 8), (3, 4, 4), (0, 2, 2), (7, 2, 6)])
def test_a_batch_that_ranks_cannot_share(batch_size: int, num_ranks: int, near: int):
    error = refusal(DataConfig(), batch_size=batch_size, num_ranks=num_ranks)
    assert error.what == f"a batch of {batch_size} sequences cannot be divided among {num_ranks} ranks"
    assert error.fix.startswith(f"set training.batch_size = {near},")


def test_settings_out_of_range_are_all_named():
    error = refusal(DataConfig(sequence_length=0, workers=-1, prefetch=0, evaluation_fraction=1.0))
    assert [line.partition(":")[0] for line in error.where.splitlines()] == [
        "data.evaluation_fraction",
        "data.sequence_length",
        "data.workers",
        "data.prefetch",
    ]


def test_nothing_left_to_train_on(tmp_path: Path):
    (tmp_path / "a.txt").write_text("x" * 10)
    config = DataConfig(source=str(tmp_path), sequence_length=8, evaluation_fraction=0.5)
    assert "holding out 1 of 1 sample(s) leaves none" in refusal(config).what
