"""Rows of batches against a plain reading of the rules, one token at a time."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from shardwise.config.run import DataConfig
from tests.unit.training.data_files import open_some, save_tokenizer, write_lines, write_tokens

END = 256
TEXTS = st.lists(st.text(alphabet="abcé\n", max_size=12), min_size=1, max_size=8)
PAIRS = st.lists(
    st.tuples(st.text(alphabet="pq", max_size=9), st.text(alphabet="abc", max_size=9)), min_size=1, max_size=8
)


def all_rows(config: DataConfig, **settings) -> dict[str, list[list[int]]]:
    """Every sample of the data, in order."""
    with open_some(config, batch_size=1, **settings) as loader:
        batches = [next(loader) for _ in range(loader.num_samples)]
    return {name: [batch[name][0].tolist() for batch in batches] for name in batches[0]}


def rows_by_hand(rows: list[list[tuple[int, int, bool]]], length: int) -> dict[str, list[list[int]]]:
    """What the rules say of rows of (token, document, is learnt), which may be shorter than `length` + 1."""
    expected = {"input_ids": [], "labels": [], "document_ids": [], "position_ids": []}
    for row in rows:
        padded = row + [(END, -1, False)] * (length + 1 - len(row))
        names = list(dict.fromkeys(document for _, document, _ in padded[:length]))
        documents = [names.index(document) for _, document, _ in padded[:length]]
        expected["input_ids"].append([token for token, _, _ in padded[:length]])
        expected["labels"].append(
            [after[0] if after[1] == before[1] and after[2] else -100 for before, after in pairwise(padded)]
        )
        expected["document_ids"].append(documents)
        expected["position_ids"].append([place - documents.index(document) for place, document in enumerate(documents)])
    return expected


def write_texts(folder: Path, texts: list[str]) -> tuple[str, ...]:
    for index, text in enumerate(texts):
        (folder / f"{index}.txt").write_bytes(text.encode())
    return tuple(str(folder / f"{index}.txt") for index in range(len(texts)))


@settings(max_examples=40, deadline=None)
@given(texts=TEXTS, length=st.integers(1, 9), as_lines=st.booleans())
def test_packed_texts_are_one_stream_cut_anywhere(texts: list[str], length: int, as_lines: bool):
    stream = [(token, number, True) for number, text in enumerate(texts) if text for token in (*text.encode(), END)]
    if len(stream) <= length:
        return
    rows = [stream[first : first + length + 1] for first in range(0, len(stream) - length, length)]
    with TemporaryDirectory() as name:
        folder = Path(name)
        source = (
            write_lines(folder / "a.jsonl", [{"text": t} for t in texts]) if as_lines else write_texts(folder, texts)
        )
        config = DataConfig(source=source, sequence_length=length, shuffle=False)
        assert all_rows(config, vocab_size=257) == rows_by_hand(rows, length)


@settings(max_examples=40, deadline=None)
@given(pairs=PAIRS, length=st.integers(2, 12))
def test_packed_prompts_stay_with_their_responses(pairs: list[tuple[str, str]], length: int):
    documents = []
    for number, (prompt, response) in enumerate(pairs):
        tokens = [(token, number, False) for token in prompt.encode()]
        tokens += [(token, number, True) for token in (*response.encode(), END)]
        if response and len(prompt) <= length:
            documents.append(tokens)
        elif response:
            documents.append([])  # nothing of it would be learnt
    if not any(prompt and response for prompt, response in pairs) or not any(documents):
        return
    rows, room = [], False
    for document in documents:
        if not document:
            room = False
        elif room and len(rows[-1]) + len(document) <= length + 1:
            rows[-1] += document
        else:
            rows.append(document[: length + 1])
            room = len(document) <= length + 1
    with TemporaryDirectory() as name:
        source = write_lines(Path(name) / "a.jsonl", [{"prompt": p, "response": r} for p, r in pairs])
        config = DataConfig(source=source, sequence_length=length, shuffle=False)
        assert all_rows(config, vocab_size=257) == rows_by_hand(rows, length)


@settings(max_examples=40, deadline=None)
@given(pairs=PAIRS, length=st.integers(1, 12), with_text_file=st.booleans())
def test_without_packing_each_document_is_a_row(pairs: list[tuple[str, str]], length: int, with_text_file: bool):
    rows = []
    for number, (prompt, response) in enumerate(pairs):
        tokens = [(token, number, False) for token in prompt.encode()]
        tokens += [(token, number, True) for token in (*response.encode(), END)]
        if response:
            rows.append(tokens[: length + 1])
    with TemporaryDirectory() as name:
        source = (write_lines(Path(name) / "a.jsonl", [{"prompt": p, "response": r} for p, r in pairs]),)
        if with_text_file:
            source += write_texts(Path(name), ["text"])
            rows.append([(token, -2, True) for token in (*b"text", END)][: length + 1])
        expected = rows_by_hand(rows, length)
        config = DataConfig(source=source, sequence_length=length, shuffle=False, pack=False)
        if any(label != -100 for row in expected["labels"] for label in row):
            assert all_rows(config, vocab_size=257) == {name: expected[name] for name in ("input_ids", "labels")}


@settings(max_examples=30, deadline=None)
@given(ids=st.lists(st.integers(250, 256), min_size=2, max_size=60), length=st.integers(1, 9), pack=st.booleans())
def test_documents_in_files_of_tokens_end_at_the_end_token(ids: list[int], length: int, pack: bool):
    numbers = [sum(token == END for token in ids[:place]) for place in range(len(ids))]
    stream = [(token, number, True) for token, number in zip(ids, numbers, strict=True)]
    if pack:
        rows = [stream[first : first + length + 1] for first in range(0, len(stream) - length, length)]
    else:
        rows = [[entry for entry in stream if entry[1] == n][: length + 1] for n in dict.fromkeys(numbers)]
    if not rows:
        return
    with TemporaryDirectory() as name:
        parts = [ids[first : first + 3] for first in range(0, len(ids), 3)]  # a row goes across several files
        source = tuple(write_tokens(Path(name) / f"{number}.bin", part) for number, part in enumerate(parts))
        config = DataConfig(source=source, sequence_length=length, shuffle=False, pack=pack)
        expected = rows_by_hand(rows, length)
        assert all_rows(config, vocab_size=257) == {
            name: expected[name] for name in (expected if pack else ("input_ids", "labels"))
        }


def test_a_large_text_file_reads_as_a_small_one(tmp_path: Path):
    """Above a megabyte it is read in pieces."""
    text = b"0123456789abcdef" * (1 << 16)
    (tmp_path / "a.txt").write_bytes(text + b"tail")
    (tmp_path / "b.txt").write_bytes(b"next" * 20)
    config = DataConfig(source=str(tmp_path), sequence_length=16, shuffle=False)
    with open_some(config, batch_size=2) as loader:
        loader.skip(len(text) // 16 // 2)
        batch = next(loader)
    assert batch["input_ids"][0].tolist() == [*b"tail", END, *b"nextnextnex"]
    assert batch["labels"][0].tolist()[3:7] == [END, -100, *b"ex"]


def test_documents_are_learnt_with_the_tokens_of_a_tokenizer_file(tmp_path: Path):
    texts = ["the cat sat on the mat", "the dog sat on the log"]
    folder = save_tokenizer(tmp_path / "tokenizer", texts)
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    config = DataConfig(source=source, tokenizer=folder, sequence_length=8, shuffle=False, pack=False)
    with open_some(config, batch_size=2) as loader:
        batch = next(loader)
        decoded = [loader.tokenizer.decode(row.tolist()) for row in batch["input_ids"]]
        ends = [int((row == loader.tokenizer.end_id).sum()) for row in batch["labels"]]
    assert [text.startswith(part) and len(part) > 8 for text, part in zip(texts, decoded, strict=True)] == [True, True]
    assert all(count <= 1 for count in ends), "only the end of the document itself is learnt"
    packed = all_rows(DataConfig(source=source, tokenizer=folder, sequence_length=4, shuffle=False))
    stream = [token for row in packed["input_ids"] for token in row]
    assert (
        stream[: len(stream)]
        == [token for text in texts for token in (*loader.tokenizer.encode(text), loader.tokenizer.end_id)][
            : len(stream)
        ]
    )


@pytest.mark.slow
def test_a_long_text_is_tokenised_in_pieces_that_end_with_lines(tmp_path: Path):
    lines = [f"line {number} of a long text\n" for number in range(60_000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    folder = save_tokenizer(tmp_path / ".tokenizer", lines[:100])
    config = DataConfig(source=str(tmp_path / "a.txt"), tokenizer=folder, sequence_length=512, shuffle=False)
    with open_some(config, batch_size=64) as loader:
        text = "".join(
            loader.tokenizer.decode(next(loader)["input_ids"].flatten().tolist())
            for _ in range(loader.num_samples // 64)
        )
    assert len(text) > 1 << 20
    assert "".join(lines).startswith(text)


@pytest.mark.parametrize("pack", [True, False])
def test_a_prompt_begins_the_document_and_its_response_goes_on(tmp_path: Path, pack: bool):
    marks = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    folder = save_tokenizer(tmp_path / "tokenizer", ["x"], post_processor=marks)
    source = write_lines(tmp_path / "a.jsonl", [{"prompt": "pq", "response": "ab"}, {"text": "t"}])
    config = DataConfig(source=source, tokenizer=folder, sequence_length=5, shuffle=False, pack=pack)
    rows = all_rows(config)
    with open_some(config) as loader:
        p, q, a, b, t = (loader.tokenizer.encode(letter)[1] for letter in "pqabt")
    assert rows["input_ids"] == [[0, p, q, a, b], [0, t, 1, 1, 1]]
    assert rows["labels"] == [[-100, -100, a, b, 1], [t, 1, -100, -100, -100]]


def test_documents_that_may_see_each_other_are_not_told_apart(tmp_path: Path):
    source = write_texts(tmp_path, ["abcd", "efgh"])
    config = DataConfig(source=source, sequence_length=8, shuffle=False, keep_apart=False)
    assert all_rows(config) == {
        "input_ids": [[*b"abcd", END, *b"efg"]],
        "labels": [[*b"bcd", END, -100, *b"fgh"]],  # nothing could tell how the next begins
    }


def test_batches_have_the_types_that_models_take(tmp_path: Path):
    (tmp_path / "a.txt").write_text("some text to learn from")
    with open_some(DataConfig(source=str(tmp_path), sequence_length=4), batch_size=2) as loader:
        batch = next(loader)
    kinds = {name: (tuple(value.shape), value.dtype) for name, value in batch.items()}
    assert kinds == {
        "input_ids": ((2, 4), torch.int64),
        "labels": ((2, 4), torch.int64),
        "document_ids": ((2, 4), torch.int32),
        "position_ids": ((2, 4), torch.int64),
    }
