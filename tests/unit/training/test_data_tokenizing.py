"""Tokenizers: bytes, and files of the tokenizers library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.training.data.samples import Bytes, TokenizerFile, check_vocabulary, open_tokenizer
from tests.unit.training.data_files import save_tokenizer

TEXTS = ["def f(x):\n    return x\n", "naïve café 🙂"]


@given(st.text())
def test_bytes_come_back_as_the_text(text: str):
    ids = Bytes().encode(text)
    assert Bytes().decode([*ids, Bytes.end_id]) == text
    assert all(0 <= token < 256 for token in ids)


def test_bytes_that_are_no_text_are_shown():
    assert Bytes().decode([104, 105, 0xFF, 300, -100]) == "hi\ufffd"


def test_a_file_or_its_folder_is_read(tmp_path: Path):
    folder = save_tokenizer(tmp_path / "saved", TEXTS)
    for path in (folder, f"{folder}/tokenizer.json"):
        tokenizer = open_tokenizer(path)
        assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS
        assert [list(ids) for ids in tokenizer.encode_all(TEXTS)] == [tokenizer.encode(text) for text in TEXTS]
        assert tokenizer.end_id == 1
        assert 258 <= tokenizer.vocab_size <= 300


def test_settings_of_the_file_that_would_cut_or_pad_are_off(tmp_path: Path):
    folder = save_tokenizer(tmp_path / "saved", TEXTS)
    file = Path(folder, "tokenizer.json")
    described = json.loads(file.read_text())
    described["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    described["padding"] = {
        "strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>",
    }  # fmt: skip
    file.write_text(json.dumps(described))
    tokenizer = open_tokenizer(folder)
    encoded = [list(ids) for ids in tokenizer.encode_all(TEXTS)]
    assert [tokenizer.decode(ids) for ids in encoded] == TEXTS
    assert all(0 not in ids for ids in encoded), "nothing is filled up"


def test_a_beginning_is_marked_only_where_a_document_begins(tmp_path: Path):
    from tokenizers.processors import TemplateProcessing

    marks = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer = open_tokenizer(save_tokenizer(tmp_path / "saved", TEXTS, post_processor=marks))
    (opening,) = tokenizer.encode_all(["return"])
    (continued,) = tokenizer.encode_all(["return"], starts=False)
    assert list(opening) == [0, *continued], "and where it ends is not for the file to say"
    assert tokenizer.encode("return") == list(opening)


@pytest.mark.parametrize("written", ["<|stop|>", {"content": "<|stop|>", "special": True}])
def test_the_config_beside_the_file_says_what_ends_a_document(tmp_path: Path, written: object):
    folder = save_tokenizer(tmp_path / "saved", TEXTS, end="<|stop|>")
    assert TokenizerFile(folder).end_id is None
    Path(folder, "tokenizer_config.json").write_text(json.dumps({"eos_token": written}))
    assert TokenizerFile(folder).end_id == 1


def test_another_file_is_another_fingerprint(tmp_path: Path):
    first = open_tokenizer(save_tokenizer(tmp_path / "a", TEXTS))
    assert open_tokenizer(save_tokenizer(tmp_path / "b", TEXTS)).fingerprint == first.fingerprint
    assert open_tokenizer(save_tokenizer(tmp_path / "c", TEXTS, end=None)).fingerprint != first.fingerprint


def test_a_model_with_fewer_tokens_is_refused():
    check_vocabulary(Bytes(), "bytes", 257)
    check_vocabulary(Bytes(), "bytes", None)
    with pytest.raises(ConfigError, match="'bytes' makes 257 tokens, the model has 256") as failure:
        check_vocabulary(Bytes(), "bytes", 256)
    assert failure.value.fix.endswith("set model_options.vocab_size = 257")


def test_a_missing_or_broken_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no such file or directory"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        open_tokenizer(str(tmp_path))
