"""Token streams, tokenizers, and the samples made from them."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.errors import ConfigError, import_optional


@dataclass(frozen=True, slots=True)
class Document:
    """One text; the prompt is excluded from the loss."""

    prompt: str
    text: str


Records = Any
"""Any object with a length and indexing; an item is a text or a mapping with one."""


@dataclass(eq=False)
class TokenStream:
    """Tokens with random access."""

    segments: list[Tensor]
    """Integer tensors of one dtype, concatenated."""
    _: KW_ONLY
    starts: Tensor | None
    """int64, first token of each document, in order; None: documents begin after each `end_id`."""
    end_id: int | None
    """The end-of-document token."""
    prompt_lengths: Tensor | None = None
    """Number of prompt tokens of each document, which are excluded from the loss; None: no prompts."""

    def __post_init__(self) -> None:
        self._offsets = [0, *accumulate(len(segment) for segment in self.segments)]
        self.num_tokens = self._offsets[-1]

    def window(self, firsts: Tensor, length: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return rows of tokens that begin at `firsts`, and masks of document starts and of prompt tokens.

        Positions beyond the end of the stream are zeros.
        """
        tokens = torch.stack([self._token_range(first, length) for first in firsts.tolist()]).to(torch.int64)
        if self.starts is None:
            return tokens, None if self.end_id is None else F.pad(tokens[:, :-1] == self.end_id, (1, 0)), None
        places = firsts[:, None] + torch.arange(length)
        documents = torch.searchsorted(self.starts, places, right=True) - 1
        begins = self.starts[documents]
        is_prompt = None if self.prompt_lengths is None else places - begins < self.prompt_lengths[documents]
        return tokens, F.pad((places == begins)[:, 1:], (1, 0)), is_prompt

    def stored_tokens(self, first: int, length: int) -> Tensor:
        """Return tokens as stored, for checks."""
        return self._token_range(first, min(length, self.num_tokens - first)).to(torch.int64)

    def _token_range(self, first: int, length: int) -> Tensor:
        """Return tokens as stored; a view if they are in one segment."""
        index = bisect_right(self._offsets, first) - 1
        begin = first - self._offsets[index]
        parts = [self.segments[index][begin : begin + length]]
        missing = length - len(parts[0])
        while missing and index + 1 < len(self.segments):
            index += 1
            parts.append(self.segments[index][:missing])
            missing -= len(parts[-1])
        if len(parts) == 1 and not missing:
            return parts[0]
        return torch.cat([*parts, torch.zeros(missing, dtype=parts[0].dtype)])


_FILE = "tokenizer.json"
# Common names of the end-of-document token, if tokenizer_config.json does not name it.
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|eot_id|>", "<|im_end|>", "[EOS]")


class Bytes:
    """Tokenizer whose tokens are UTF-8 bytes; 256 is the end-of-document token."""

    vocab_size = 257
    """Upper bound of the ids."""
    end_id = 256
    """The end-of-document token; None if there is none."""
    fingerprint = "bytes"
    """Identifies the tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a document that begins with this text, without an end token."""
        return list(text.encode())

    def encode_all(self, texts: Sequence[str], *, starts: bool = True) -> Iterable[Sequence[int]]:
        """Tokens of many texts. Without `starts` the texts continue others and get no begin tokens."""
        return (text.encode(errors="surrogatepass") for text in texts)

    def decode(self, ids: Iterable[int]) -> str:
        """Text, with replacement characters for invalid UTF-8, without end tokens."""
        return bytes(token for token in ids if 0 <= token < 256).decode(errors="replace")


class TokenizerFile:
    """Tokenizer from a `tokenizer.json` of the tokenizers library, given as the file or its folder."""

    def __init__(self, path: str | Path) -> None:
        file = Path(path)
        file = file / _FILE if file.is_dir() else file
        tokenizers = import_optional(
            "tokenizers",
            where=f"data.tokenizer = {file}",
            why=f"a {_FILE} is read by that library",
            fix="pip install tokenizers, or set data.tokenizer = bytes",
        )
        try:
            content = file.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except OSError as error:
            raise ConfigError(
                f"cannot read the tokenizer {file}: {(error.strerror or type(error).__name__).lower()}",
                where="data.tokenizer",
                why=f"it is `bytes`, a {_FILE}, or its folder",
                fix="set data.tokenizer = bytes, or an existing file",
            ) from None
        except Exception as error:  # the library raises bare Exceptions
            raise ConfigError(
                f"{file} is not a tokenizer: {error}",
                where="data.tokenizer",
                why="the tokenizers library reads it",
                fix=f"name a {_FILE} as saved by `tokenizer.save_pretrained`",
            ) from None
        # A file may enable both, which would silently truncate documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.end_id = _end_id(file.parent, vocab)
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Tokens, including begin tokens."""
        return self._without_end(self._tokenizer.encode(text).ids)

    def encode_all(self, texts: Sequence[str], *, starts: bool = True) -> Iterable[Sequence[int]]:
        """Tokens of each text; the library uses all cores."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=starts)
        return (self._without_end(encoding.ids) for encoding in encodings)

    def decode(self, ids: Iterable[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode([token for token in ids if 0 <= token < self.vocab_size])

    def _without_end(self, ids: list[int]) -> list[int]:
        """Drop the end token that some tokenizers add to every text."""
        return ids[:-1] if ids and ids[-1] == self.end_id else ids


Tokenizer = Bytes | TokenizerFile


def open_tokenizer(name: str) -> Tokenizer:
    """Open the tokenizer `bytes`, a `tokenizer.json`, or the folder of one."""
    return Bytes() if name == "bytes" else TokenizerFile(name)


def check_vocabulary(tokenizer: Tokenizer, name: str, vocab_size: int | None) -> None:
    """Raise a ConfigError unless the model has a row for every token of the tokenizer."""
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer {name!r} makes {tokenizer.vocab_size} tokens, the model has {vocab_size}",
            where="data.tokenizer, model",
            why="every token id needs a row in the model's embedding",
            fix=f"name the model's own tokenizer, or set model_options.vocab_size = {tokenizer.vocab_size}",
        )


def _end_id(folder: Path, vocab: dict[str, int]) -> int | None:
    """Return the end token of the folder's tokenizer_config.json, or by common names."""
    try:
        token = json.loads((folder / "tokenizer_config.json").read_bytes()).get("eos_token")
    except (OSError, ValueError, AttributeError):
        token = None
    if isinstance(token, dict):  # older files have a mapping here
        token = token.get("content")
    names = [token, *_END_NAMES] if isinstance(token, str) else list(_END_NAMES)
    return next((vocab[name] for name in names if name in vocab), None)


IGNORED = -100
"""Label of tokens excluded from the loss; the default of cross-entropy."""
Batch = dict[str, Tensor]
Rows = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""From sample indices to the first token of each in the stream, and its number of tokens; None: full rows."""


@dataclass(eq=False)
class StreamSamples:
    """Samples that are ranges of a token stream."""

    stream: TokenStream
    """The tokens."""
    rows: Rows
    """Position of each sample."""
    num_samples: int
    _: KW_ONLY
    length: int
    """Number of tokens in a sequence; a row of the stream has one more, the last label."""
    apart: bool
    """Mask attention between the documents of a row: batches get `document_ids` and `position_ids`."""
    vocab_size: int | None = None
    """Raise for larger tokens; None: already checked."""

    def __post_init__(self) -> None:
        self._columns = torch.arange(self.length + 1)

    def batch(self, indices: Tensor) -> Batch:
        """These samples as rows."""
        firsts, lengths = self.rows(indices)
        tokens, is_start, ignored = self.stream.window(firsts, self.length + 1)
        if lengths is not None:
            beyond = self._columns >= lengths[:, None]
            tokens.masked_fill_(beyond, self.stream.end_id or 0)
            ignored = _either(ignored, beyond)
            # Padding is a separate document, so that no token attends to it.
            border = self._columns == lengths[:, None]
            is_start = border if is_start is None else (is_start & ~beyond) | border
        if self.vocab_size is not None:
            check_tokens(tokens, self.vocab_size, f"a batch with sample {int(indices[0])}")
        # The first token of a document cannot be predicted from the one before it.
        ignored = _either(ignored, is_start)
        labels = tokens[:, 1:] if ignored is None else tokens[:, 1:].masked_fill(ignored[:, 1:], IGNORED)
        batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": labels.contiguous()}
        return batch | self._places(len(indices), is_start) if self.apart else batch

    def _places(self, num_rows: int, is_start: Tensor | None) -> Batch:
        """Document index of every token and its position in the document; both count from 0 in each row."""
        columns = self._columns[:-1]
        if is_start is None:
            documents = torch.zeros(num_rows, len(columns), dtype=torch.int32)
            return {"document_ids": documents, "position_ids": columns.repeat(num_rows, 1)}
        is_start = is_start[:, :-1]
        begins = torch.where(is_start, columns, 0).cummax(1).values
        return {"document_ids": is_start.cumsum(1, dtype=torch.int32), "position_ids": columns - begins}


def encode_documents(
    tokenizer: Tokenizer, documents: Sequence[Document]
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Tokens of each prompt and text; begin tokens go to the prompt, or to the text without one."""
    openings = tokenizer.encode_all([document.prompt or document.text for document in documents])
    answers = iter(tokenizer.encode_all([d.text for d in documents if d.prompt], starts=False))
    for document, opening in zip(documents, openings, strict=True):
        yield (opening, next(answers)) if document.prompt else (b"", opening)


class ReadySamples:
    """Items of a `module:callable`: mappings of tensors, stacked, or collated by its `collate(items)`."""

    def __init__(self, items: Records, name: str, vocab_size: int | None) -> None:
        self.num_samples = len(items)
        self._items, self._name, self._vocab_size = items, name, vocab_size
        self._collate: Callable[[list[Any]], Mapping[str, Any]] = getattr(items, "collate", self._stack)

    def batch(self, indices: Tensor) -> Batch:
        """Collate these items; a ConfigError if their keys or shapes differ."""
        batch = {
            key: torch.as_tensor(v) for key, v in self._collate([self._items[i] for i in indices.tolist()]).items()
        }
        ids = batch.get("input_ids")
        if ids is not None and self._vocab_size is not None and not ids.is_floating_point():
            check_tokens(ids, self._vocab_size, self._name)
        return batch

    def _stack(self, items: list[Any]) -> dict[str, Tensor]:
        try:
            return {key: torch.stack([torch.as_tensor(item[key]) for item in items]) for key in items[0]}
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise ConfigError(
                f"items of {self._name} cannot be collated: {type(error).__name__}: {error}",
                where=f"data.source = {self._name}",
                why="an item is a mapping of tensors, with the same keys and shapes in every item",
                fix="use one shape for all items, or add a method collate(items) that returns the batch",
            ) from error


Samples = StreamSamples | ReadySamples
"""Samples by index; thread-safe."""


def _either(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return one if other is None else other if one is None else one | other


def check_tokens(tokens: Tensor, vocab_size: int, where: str) -> None:
    """Raise a ConfigError if a token has no row in the model."""
    if not tokens.numel():
        return
    least, most = (int(bound) for bound in tokens.aminmax())
    if least < 0 or most >= vocab_size:
        raise ConfigError(
            f"the data holds token {least if least < 0 else most}, the model has 0 to {vocab_size - 1}",
            where=where,
            why="every token id needs a row in the model's embedding",
            fix="name the model whose tokenizer made the data, or check data.token_dtype; "
            f"model_options.vocab_size = {most + 1} would do for this one",
        )
