"""Read, tokenize and pack a data source into samples."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.config.run import DataConfig
from shardwise.errors import ConfigError, raise_listed
from shardwise.models.load import find_callable
from shardwise.training.data import records
from shardwise.training.data import samples as sampling
from shardwise.training.data.records import DataSource, Document, Records, find_sources, refuse_unreadable
from shardwise.training.data.samples import Bytes, Rows, Samples, StreamSamples, Tokenizer, TokenStream, open_tokenizer

_CHUNK_TOKENS = 1 << 24
_CHUNK_DOCUMENTS = 1 << 16


def cut_anywhere(stream: TokenStream, length: int) -> tuple[Rows, int]:
    """Row i is the i-th run of `length` tokens; its last label is the first token of the next row.

    Documents continue in the next row; only the last few tokens are dropped.
    """
    num_samples = max(0, (stream.num_tokens - 1) // length)
    return lambda indices: (indices * length, None), num_samples


def whole_documents(stream: TokenStream, length: int) -> tuple[Rows, int]:
    """Rows of as many whole documents as fit, in order; a document longer than a row is truncated.

    For prompts with responses: half a response without its prompt is useless. Documents whose prompt fills a row are
    dropped; it is a ConfigError if all are.
    """
    firsts, used = array("q"), array("q")
    room = 0
    assert stream.starts is not None
    assert stream.prompt_lengths is not None
    ends = F.pad(stream.starts[1:], (0, 1), value=stream.num_tokens)
    for start, end, num_prompt in zip(*map(_numbers, (stream.starts, ends, stream.prompt_lengths)), strict=True):
        size = min(end - start, length + 1)
        if num_prompt >= size:
            room = 0  # no label would be left; rows do not cross it
        elif size <= room:
            used[-1] += size
            room -= size
        else:
            firsts.append(start)
            used.append(size)
            # A truncated document continues in the stream.
            room = length + 1 - size if size == end - start else 0
    if not firsts and stream.num_tokens:
        raise no_room(length)
    first, length_used = _tensor(firsts), _tensor(used)
    return lambda indices: (first[indices], length_used[indices]), len(first)


def one_document(stream: TokenStream, length: int) -> tuple[Rows, int]:
    """Each row is one document, truncated or padded; it is a ConfigError if prompts fill all rows."""
    starts = find_starts(stream)
    lengths = (F.pad(starts[1:], (0, 1), value=stream.num_tokens) - starts).clamp(max=length + 1)
    if len(starts) and stream.prompt_lengths is not None and not (stream.prompt_lengths < lengths).any():
        raise no_room(length)
    return lambda indices: (starts[indices], lengths[indices]), len(starts)


def no_room(length: int) -> ConfigError:
    """The error for data without any label."""
    return ConfigError(
        f"every document is empty, or its prompt alone fills a sequence of {length} tokens",
        where="data.sequence_length",
        why="a sequence begins with the prompt, and only what comes after it is learnt",
        fix="set a longer data.sequence_length, or shorten the prompts",
    )


def find_starts(stream: TokenStream) -> Tensor:
    """Where documents begin; in a stream without an index, by reading all of it once."""
    if stream.starts is not None:
        return stream.starts
    if stream.end_id is None:
        raise ConfigError(
            "one document a sequence was asked for, and nothing says where documents end",
            where="data.pack, data.tokenizer",
            why="in a file of tokens, documents end at the tokenizer's end-of-document token",
            fix="set data.tokenizer to the tokenizer that made the tokens, or data.pack = true",
        )
    parts = [torch.zeros(1, dtype=torch.int64)]
    for first in range(0, stream.num_tokens, _CHUNK_TOKENS):
        ends = (stream.piece(first, _CHUNK_TOKENS) == stream.end_id).nonzero().flatten()
        parts.append(ends + (first + 1))
    starts = torch.cat(parts)
    return starts[starts < stream.num_tokens]


def _numbers(values: Tensor) -> Iterator[int]:
    """The values, converted in chunks: Python integers take much memory."""
    return (number for part in values.split(_CHUNK_DOCUMENTS) for number in part.tolist())


def _tensor(values: array[int]) -> Tensor:
    return torch.frombuffer(values, dtype=torch.int64) if values else torch.zeros(0, dtype=torch.int64)


_NUM_WINDOWS = 64
_WINDOW_TOKENS = 1 << 16


def open_token_files(
    files: Sequence[Path], dtype_name: str, tokenizer: Tokenizer, vocab_size: int | None
) -> tuple[TokenStream, Tokenizer | None]:
    """Map files of plain token ids, in this machine's byte order, one after the other.

    Of large files only parts are checked here; `StreamSamples` checks what it hands out.

    Returns:
        The stream, and the tokenizer if it can have made these tokens. (`bytes` is what a config says that says
        nothing; tokens beyond it were made by another, and then nothing is known of where documents end.)
    """
    dtype = getattr(torch, dtype_name)
    sizes = {file: file.stat().st_size for file in files}
    raise_listed(
        [f"{file}: {size} bytes" for file, size in sizes.items() if size % dtype.itemsize],
        "{num} file(s) do not hold whole tokens",
        why=f"a file of tokens holds {dtype.itemsize} byte(s) for each ({dtype_name}) and nothing else",
        fix="set data.token_dtype as the files were written, or write them again",
    )
    segments = [
        torch.from_file(str(file), shared=False, size=size // dtype.itemsize, dtype=dtype)
        for file, size in sizes.items()
        if size
    ]
    stream = TokenStream(segments, starts=None, end_id=tokenizer.end_id)
    most = -1  # in windows spread over the stream; in all of a small one
    where = f"{files[0]}" + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    for first in range(0, stream.num_tokens, max(_WINDOW_TOKENS, stream.num_tokens // _NUM_WINDOWS)):
        window = stream.piece(first, _WINDOW_TOKENS)
        sampling.check_tokens(window, vocab_size if vocab_size is not None else 1 << 62, where)
        most = max(most, int(window.max()))
    if most < tokenizer.vocab_size:
        return stream, tokenizer
    if isinstance(tokenizer, Bytes):
        return TokenStream(segments, starts=None, end_id=None), None
    raise ConfigError(
        f"the data holds token {most}, the tokenizer makes only 0 to {tokenizer.vocab_size - 1}",
        where="data.tokenizer, " + ", ".join(str(file) for file in files[:3]),
        why="the tokenizer says which token ends a document, and reads the model's samples",
        fix="name the tokenizer that made the data, or check data.token_dtype",
    )


_BLOCK_TOKENS = 1 << 22
_PIECE_CHARS = 1 << 20
_PIECES_TOGETHER = 8
_NUM_TOGETHER = 512


class Spool:
    """Turns documents into a token stream, of two or four bytes a token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._code, self._dtype = ("H", torch.uint16) if tokenizer.vocab_size <= 1 << 16 else ("i", torch.int32)
        self._block = array(self._code)
        self._segments: list[Tensor] = []
        self._num_tokens = 0
        self._starts, self._prompt_lengths = array("q"), array("q")

    def add_files(self, files: Sequence[Path]) -> None:
        """Each file is a document; a ConfigError lists those that are not text."""
        problems = []
        for file in files:
            try:
                self._add_file(file)
            except ValueError as error:
                problems.append(f"{file}: {error}")
        raise_listed(
            problems,
            "{num} file(s) of the data are not text",
            why="what is neither JSONL nor tokens is read as UTF-8 text",
            fix="name only text files, as in data.source = 'folder/**/*.txt', or set data.format",
        )

    def add_documents(self, documents: Iterator[Document]) -> None:
        """Add those that have a text beside their prompt."""
        while batch := list(islice(documents, _NUM_TOGETHER)):
            for prompt, text in sampling.encode_documents(self._tokenizer, batch):
                if text:
                    self._add([prompt, text], len(prompt))

    def stream(self) -> TokenStream:
        """The stream of everything that was added."""
        self._close_block()
        prompt_lengths = _tensor(self._prompt_lengths)
        return TokenStream(
            self._segments,
            starts=_tensor(self._starts),
            end_id=self._tokenizer.end_id,
            prompt_lengths=prompt_lengths if bool(prompt_lengths.any()) else None,
        )

    def _add_file(self, file: Path) -> None:
        if file.stat().st_size == 0:
            return
        with file.open("rb") as opened:
            if b"\0" in opened.read(8192):
                raise ValueError("it has zero bytes")
        self._add(self._pieces(file), 0)

    def _pieces(self, file: Path) -> Iterator[Sequence[int]]:
        """Tokens of a text that may be larger than memory, split at line ends where possible."""
        if isinstance(self._tokenizer, Bytes):  # any text, whatever its encoding
            with file.open("rb") as raw:
                yield from iter(lambda: raw.read(_PIECE_CHARS), b"")
            return
        with file.open(encoding="utf-8", newline="") as opened:
            pieces = iter(lambda: opened.read(_PIECE_CHARS) + opened.readline(_PIECE_CHARS), "")
            yield from self._tokenizer.encode_all(list(islice(pieces, 1)))
            while together := list(islice(pieces, _PIECES_TOGETHER)):
                yield from self._tokenizer.encode_all(together, starts=False)

    def _add(self, parts: Iterable[Sequence[int]], prompt_length: int) -> None:
        """Add a document in parts, and the token that ends it."""
        self._starts.append(self._num_tokens)
        self._prompt_lengths.append(prompt_length)
        end = [] if self._tokenizer.end_id is None else [[self._tokenizer.end_id]]
        for tokens in chain(parts, end):
            if isinstance(tokens, bytes):  # a codec makes 16 bits of each byte, far faster than a loop
                self._block.frombytes(tokens.decode("latin-1").encode(f"utf-16-{sys.byteorder[0]}e"))
            else:
                self._block.extend(tokens)
            self._num_tokens += len(tokens)
            if len(self._block) >= _BLOCK_TOKENS:
                self._close_block()

    def _close_block(self) -> None:
        if self._block:
            self._segments.append(torch.frombuffer(self._block, dtype=self._dtype))
            self._block = array(self._code)


def open_samples(
    config: DataConfig, names: str | tuple[str, ...], where: str, vocab_size: int | None
) -> tuple[Samples, Tokenizer | None, dict[str, Any]]:
    """Find, read and number the samples of `names`, which the setting `where` holds.

    Returns:
        The samples; the tokenizer that made the tokens, where it is known; and the identity of the data, by setting.

    Raises:
        ConfigError: The data is missing, empty, unreadable, too short, or does not fit the model.
        EnvironmentProblem: It needs a library that is not installed.
    """
    sources = find_sources(names, config.format, where=where)
    tokenizer = open_tokenizer(config.tokenizer)
    try:
        samples, tokenizer = _make_samples(config, sources, tokenizer, vocab_size)
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
    return samples, tokenizer, fingerprint


def _make_samples(
    config: DataConfig, sources: list[DataSource], tokenizer: Tokenizer, vocab_size: int | None
) -> tuple[Samples, Tokenizer | None]:
    if sources[0].format == "tokens":
        stream, known = open_token_files(sources[0].files, config.token_dtype, tokenizer, vocab_size)
        return _stream_samples(config, stream, vocab_size), known
    items = _call(sources[0].callable, config) if sources[0].format == "callable" else None
    if items is not None and not _is_document(items, config):
        return sampling.ReadySamples(items, sources[0].callable, vocab_size), None
    sampling.check_vocabulary(tokenizer, config.tokenizer, vocab_size)
    spool, problems = Spool(tokenizer), []
    for source in sources:
        if source.format == "text":
            spool.add_files(source.files)
        else:
            spool.add_documents(records.read_documents(source, items, config, problems))
    refuse_unreadable(problems)
    return _stream_samples(config, spool.stream()), tokenizer


def _stream_samples(config: DataConfig, stream: TokenStream, vocab_size: int | None = None) -> StreamSamples:
    place = one_document if not config.pack else whole_documents if stream.prompt_lengths is not None else cut_anywhere
    rows, num_samples = place(stream, config.sequence_length)
    apart = config.pack and config.keep_apart
    return StreamSamples(stream, rows, num_samples, length=config.sequence_length, apart=apart, vocab_size=vocab_size)


def _call(name: str, config: DataConfig) -> Records:
    """The items that the user's callable returns, which need a length and indices."""
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
    """Whether items are texts rather than samples of tensors."""
    if not len(items):
        return True
    first = items[0]
    if isinstance(first, Mapping) and not any(isinstance(value, str) for value in first.values()):
        return False
    try:
        records.to_document(first, config)
    except ValueError as error:
        raise ConfigError(
            f"the first item is neither a text nor a sample: {error}",
            where="data.source",
            why="an item is a text, a mapping with text, or a mapping of tensors",
            fix="set data.text_field, or data.prompt_field and data.response_field, to the names in the items",
        ) from None
    return True


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
