"""From a source to numbered samples: find it, tokenise what has to be, and say where each sample lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.config.run import DataConfig
from shardwise.errors import ConfigError
from shardwise.models.load import find_callable
from shardwise.progress import Progress
from shardwise.training.data.json_lines import JsonLines
from shardwise.training.data.packing import cut_anywhere, no_room, one_document, whole_documents
from shardwise.training.data.records import Documents, Records, check_documents, open_dataset, to_document
from shardwise.training.data.samples import IGNORED, DocumentSamples, ReadySamples, Samples, StreamSamples
from shardwise.training.data.sources import Source, find_sources
from shardwise.training.data.spooling import Spool
from shardwise.training.data.stream import TokenStream
from shardwise.training.data.token_files import open_token_files
from shardwise.training.data.tokenizing import Tokenizer, check_vocabulary, open_tokenizer

_NUM_CHECKED = 10_000
_NUM_TOKENISED = 100


@dataclass(frozen=True, slots=True)
class Opened:
    """Data that is ready to be read."""

    samples: Samples
    tokenizer: Tokenizer | None
    """What made the tokens, where that is known."""
    fingerprint: dict[str, Any]
    """What the data is, by the names of the settings."""


def open_samples(
    config: DataConfig, names: str | tuple[str, ...], where: str, vocab_size: int | None, progress: Progress
) -> Opened:
    """Find, read and number the samples of a source.

    Args:
        config: The data.
        names: Its source, or its evaluation.
        where: Which of the two, for errors.
        vocab_size: Tokens that the model knows; None: not checked.
        progress: Hears of files and records that are tokenised.

    Raises:
        ConfigError: The data is missing, empty, unreadable, too short, or does not fit the model.
        EnvironmentProblem: It needs a library that is not installed.

    Ranks:
        Local.
    """
    sources = find_sources(names, config.format, where=where)
    tokenizer = open_tokenizer(config.tokenizer)
    try:
        samples, tokenizer = _make_samples(config, sources, tokenizer, vocab_size, progress)
        digest = "+".join(source.digest for source in sources)
    except OSError as error:
        raise ConfigError(
            f"cannot read {error.filename or 'the data'}: {(error.strerror or str(error)).lower()}",
            where=where,
            why="every file of the data is read on every rank",
            fix="check that it exists and may be read, on every machine",
        ) from error
    _refuse_empty(samples, config, where)
    fingerprint = {
        "source": digest,
        "tokenizer": tokenizer.fingerprint if tokenizer else None,
        "sequence_length": config.sequence_length,
        "pack": config.pack,
    }
    return Opened(samples, tokenizer, fingerprint)


def _make_samples(
    config: DataConfig, sources: list[Source], tokenizer: Tokenizer, vocab_size: int | None, progress: Progress
) -> tuple[Samples, Tokenizer | None]:
    if sources[0].format == "tokens":
        return _token_samples(config, sources[0], tokenizer, vocab_size)
    items = _call(sources[0].callable, config) if sources[0].format == "callable" else None
    if items is not None and not _is_document(items, config):
        return ReadySamples(items, sources[0].callable, vocab_size), None
    check_vocabulary(tokenizer, config.tokenizer, vocab_size)
    return _text_samples(config, sources, items, tokenizer, progress), tokenizer


def _text_samples(
    config: DataConfig, sources: list[Source], items: Records | None, tokenizer: Tokenizer, progress: Progress
) -> Samples:
    parts = {id(source): _documents(source, items, config) for source in sources if source.format != "text"}
    if not config.pack and len(parts) == len(sources) == 1:
        documents = parts[id(sources[0])]
        check_documents(documents, _some(len(documents)))
        samples = DocumentSamples(documents, tokenizer, config.sequence_length)
        _check_room(samples, config.sequence_length)
        return samples
    spool = Spool(tokenizer, progress)
    total = sum(len(parts[id(source)]) if id(source) in parts else len(source.files) for source in sources)
    progress.start(total, "reading the data")
    for source in sources:
        if source.format == "text":
            spool.add_files(source.files)
        else:
            spool.add_documents(parts[id(source)])
    progress.finish()
    return _stream_samples(config, spool.stream())


def _stream_samples(config: DataConfig, stream: TokenStream, vocab_size: int | None = None) -> StreamSamples:
    place = one_document if not config.pack else whole_documents if stream.prompt_lengths is not None else cut_anywhere
    rows, num_samples = place(stream, config.sequence_length)
    return StreamSamples(
        stream,
        rows,
        num_samples,
        length=config.sequence_length,
        apart=config.pack and config.keep_apart,
        vocab_size=vocab_size,
    )


def _token_samples(
    config: DataConfig, source: Source, tokenizer: Tokenizer, vocab_size: int | None
) -> tuple[Samples, Tokenizer | None]:
    stream, known = open_token_files(source.files, config.token_dtype, tokenizer, vocab_size)
    return _stream_samples(config, stream, vocab_size), known


def _documents(source: Source, items: Records | None, config: DataConfig) -> Documents:
    if items is not None:
        return Documents([(source.callable, items)], config)
    opener = JsonLines if source.format == "jsonl" else open_dataset
    return Documents([(str(file), opener(file)) for file in source.files], config)


def _call(name: str, config: DataConfig) -> Records:
    """What the user's callable returns, which must be numbered."""
    items = find_callable(name)(config)
    if not hasattr(items, "__len__") or not hasattr(items, "__getitem__"):
        raise ConfigError(
            f"{name} returned a {type(items).__name__}, which has no length and items",
            where="data.source",
            why="the samples of all ranks and epochs are numbered, so that a run can go on where it stopped",
            fix="return a list, a torch Dataset, or another object with __len__ and __getitem__",
        )
    return items


def _is_document(items: Records, config: DataConfig) -> bool:
    """Whether items are texts, and not samples ready for the model."""
    if not len(items):
        return True
    first = items[0]
    if isinstance(first, Mapping) and not any(isinstance(value, str) for value in first.values()):
        return False
    try:
        to_document(first, config)
    except ValueError as error:
        raise ConfigError(
            f"the first item is neither a text nor a sample: {error}",
            where="data.source",
            why="an item is a text, a mapping with text, or a mapping of tensors",
            fix="set data.text_field, or data.prompt_field and data.response_field, to the names in the items",
        ) from None
    return True


def _some(num: int) -> range:
    """All of them, or as many as take a moment, evenly spread."""
    return range(0, num, max(1, num // _NUM_CHECKED))


def _check_room(samples: DocumentSamples, length: int) -> None:
    """Raise if not one of a few documents would teach anything."""
    few = range(0, samples.num_samples, max(1, samples.num_samples // _NUM_TOKENISED))
    if few and not any(bool((samples.batch(torch.tensor([index]))["labels"] != IGNORED).any()) for index in few):
        raise no_room(length)


def _refuse_empty(samples: Samples, config: DataConfig, where: str) -> None:
    if samples.num_samples:
        return
    num_tokens = samples.stream.num_tokens if isinstance(samples, StreamSamples) else 0
    if num_tokens > 1:
        raise ConfigError(
            f"the data has {num_tokens} tokens, too few for one sequence of {config.sequence_length}",
            where=f"{where}, data.sequence_length",
            why="a sequence and the label of its last token are taken from the data without a gap",
            fix=f"give more data, or set data.sequence_length = {num_tokens - 1} or less",
        )
    raise ConfigError(
        "the data is empty",
        where=where,
        why="there is nothing to learn from",
        fix="name files with text in them",
    )
