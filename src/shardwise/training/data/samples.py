"""Tokens of records, in streams, and the samples cut from them."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.errors import ConfigError, import_optional
from shardwise.training.data.records import Document, Documents, Records


class TokenStream:
    """Tokens with random access.

    Args:
        segments: Tensors of integers of one kind, which follow one another.
        starts: int64, where each document begins, in order; None: wherever `end_id` stands before.
        end_id: The token that ends a document.
        prompt_lengths: For each document, how many of its first tokens are not learnt; None: all are learnt.
        fill_ends: The last token of each document is `end_id`, whatever the segments hold (a byte cannot hold 256).
    """

    def __init__(
        self,
        segments: list[Tensor],
        *,
        starts: Tensor | None,
        end_id: int | None,
        prompt_lengths: Tensor | None = None,
        fill_ends: bool = False,
    ) -> None:
        self._segments = segments
        self._offsets = [0, *accumulate(len(segment) for segment in segments)]
        self.num_tokens = self._offsets[-1]
        # Behind the last document another would begin.
        self._borders = None if starts is None else torch.cat([starts, torch.tensor([self.num_tokens])])
        self.starts = None if self._borders is None else self._borders[:-1]
        self.end_id = end_id
        self.prompt_lengths = prompt_lengths
        self._fill_ends = fill_ends

    def window(self, firsts: Tensor, length: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Rows that begin at `firsts`; beyond the end of the stream they hold zeros.

        Returns:
            The tokens, int64 (rows, length); which of them begin a document inside a row, None: none does; and which
            belong to a prompt, which is not learnt, None: none does.
        """
        tokens = torch.stack([self._stretch(first, length) for first in firsts.tolist()]).to(torch.int64)
        if self._borders is None:
            if self.end_id is None:
                return tokens, None, None
            return tokens, F.pad(tokens[:, :-1] == self.end_id, (1, 0)), None
        # One column more: the last token ends its document if the next begins another.
        document, is_start = self._documents(self._borders, firsts, length + 1)
        if is_start is not None and self._fill_ends:
            tokens.masked_fill_(is_start[:, 1:], self.end_id or 0)
        is_prompt = self._prompts(firsts, document, is_start, length)
        return tokens, None if is_start is None else is_start[:, :-1], is_prompt

    def piece(self, first: int, length: int) -> Tensor:
        """One stretch as it is stored, without ends filled in; for checks."""
        return self._stretch(first, min(length, self.num_tokens - first)).to(torch.int64)

    def _stretch(self, first: int, length: int) -> Tensor:
        """Tokens as they are stored; a view, where one segment holds them all."""
        index = bisect_right(self._offsets, first) - 1
        begin = first - self._offsets[index]
        parts = [self._segments[index][begin : begin + length]]
        missing = length - len(parts[0])
        while missing and index + 1 < len(self._segments):
            index += 1
            parts.append(self._segments[index][:missing])
            missing -= len(parts[-1])
        if len(parts) == 1 and not missing:
            return parts[0]
        return torch.cat([*parts, torch.zeros(missing, dtype=parts[0].dtype)])

    def _documents(self, borders: Tensor, firsts: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
        """The number of the document in which each row begins, and where others begin in it."""
        after = torch.searchsorted(borders, firsts, right=True)
        counts = torch.searchsorted(borders, firsts + length) - after
        if not counts.any():
            return after - 1, None
        rows = torch.repeat_interleave(counts)
        skipped = counts.cumsum(0) - counts
        numbers = torch.arange(len(rows)) - skipped[rows] + after[rows]
        is_start = torch.zeros(len(firsts), length, dtype=torch.bool)
        is_start[rows, borders[numbers] - firsts[rows]] = True
        return after - 1, is_start

    def _prompts(self, firsts: Tensor, document: Tensor, is_start: Tensor | None, length: int) -> Tensor | None:
        if self.prompt_lengths is None or self.starts is None:
            return None
        number = document[:, None] if is_start is None else document[:, None] + is_start[:, :-1].cumsum(1)
        number = number.clamp(max=len(self.starts) - 1)
        place = firsts[:, None] + torch.arange(length) - self.starts[number]
        return place < self.prompt_lengths[number]


_FILE = "tokenizer.json"
# Where the file beside it does not say which token ends a document: the names that are in use.
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|eot_id|>", "<|im_end|>", "[EOS]")


class Bytes:
    """Each byte of UTF-8 is a token, and 256 ends a document."""

    vocab_size = 257
    """All ids are below it."""
    end_id = 256
    """The token that ends a document; None if there is none."""
    fingerprint = "bytes"
    """Two tokenizers with the same one make the same tokens."""

    def encode(self, text: str) -> list[int]:
        """The tokens with which a document of this text begins; its end is not marked."""
        return list(text.encode())

    def encode_all(self, texts: Sequence[str], *, starts: bool = True) -> Iterable[Sequence[int]]:
        """Tokens of many texts. Not `starts`: the texts continue others, so nothing marks their beginning."""
        return (text.encode(errors="surrogatepass") for text in texts)

    def decode(self, ids: Iterable[int]) -> str:
        """Text, with a replacement character for what is not UTF-8; ends of documents are left out."""
        return bytes(token for token in ids if 0 <= token < 256).decode(errors="replace")


class TokenizerFile:
    """A `tokenizer.json` of the tokenizers library.

    Args:
        path: The file, or the folder that holds it.

    Raises:
        ConfigError: It is missing or cannot be read.
        EnvironmentProblem: The library is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        file = Path(path)
        file = file / _FILE if file.is_dir() else file
        content = _read(file)
        self._tokenizer = _parse(content, file)
        # A file may ask for both; they would cut documents without a word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.end_id = _end_id(file.parent, vocab)
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """The tokens, those that mark a beginning included."""
        return self._without_end(self._tokenizer.encode(text).ids)

    def encode_all(self, texts: Sequence[str], *, starts: bool = True) -> Iterable[Sequence[int]]:
        """The tokens of each; the library works on all cores at once."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=starts)
        return (self._without_end(encoding.ids) for encoding in encodings)

    def decode(self, ids: Iterable[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode([token for token in ids if 0 <= token < self.vocab_size])

    def _without_end(self, ids: list[int]) -> list[int]:
        """Some files end each text themselves; where a document ends is not theirs to say."""
        return ids[:-1] if ids and ids[-1] == self.end_id else ids


Tokenizer = Bytes | TokenizerFile


def open_tokenizer(name: str) -> Tokenizer:
    """`bytes`, a `tokenizer.json`, or the folder of one."""
    return Bytes() if name == "bytes" else TokenizerFile(name)


def check_vocabulary(tokenizer: Tokenizer, name: str, vocab_size: int | None) -> None:
    """Raise unless the model has a row for every token.

    Raises:
        ConfigError: The tokenizer knows more tokens than the model.
    """
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer {name!r} makes {tokenizer.vocab_size} tokens, the model knows {vocab_size}",
            where="data.tokenizer, model",
            why="every token id needs a row in the model's embedding",
            fix=f"name the model's own tokenizer, or set model_options.vocab_size = {tokenizer.vocab_size}",
        )


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read the tokenizer {file}: {(error.strerror or type(error).__name__).lower()}",
            where="data.tokenizer",
            why=f"it is `bytes`, or a {_FILE}, or the folder that holds one",
            fix="set data.tokenizer = bytes, or name an existing file",
        ) from None


def _parse(content: bytes, file: Path) -> Any:
    tokenizers = import_optional(
        "tokenizers",
        where=f"data.tokenizer = {file}",
        why=f"a {_FILE} is read by that library",
        fix="pip install tokenizers, or set data.tokenizer = bytes",
    )
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exceptions
        raise ConfigError(
            f"{file} is not a tokenizer: {error}",
            where="data.tokenizer",
            why="it is read by the tokenizers library",
            fix=f"name a {_FILE} as saved by `tokenizer.save_pretrained`",
        ) from None


def _end_id(folder: Path, vocab: dict[str, int]) -> int | None:
    """As the folder's tokenizer_config.json says, else by the usual names."""
    try:
        token = json.loads((folder / "tokenizer_config.json").read_bytes()).get("eos_token")
    except (OSError, ValueError, AttributeError):
        token = None
    if isinstance(token, dict):  # older files describe it
        token = token.get("content")
    names = [token, *_END_NAMES] if isinstance(token, str) else list(_END_NAMES)
    return next((vocab[name] for name in names if name in vocab), None)


IGNORED = -100
"""The label of what is not learnt; cross-entropy's own default."""
Batch = dict[str, Tensor]
Rows = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""From numbers of samples to where each begins in the stream, and how many tokens it has; None: all that fit."""


class StreamSamples:
    """Samples cut from a stream.

    Args:
        stream: The tokens.
        rows: Where each sample lies.
        num_samples: How many there are.
        length: Tokens of a sequence; a row of the stream has one more, the last label.
        apart: Rows hold several documents, which must not see each other: say which, and where each begins.
        vocab_size: Refuse tokens from here on; None: they were checked.
    """

    def __init__(
        self,
        stream: TokenStream,
        rows: Rows,
        num_samples: int,
        *,
        length: int,
        apart: bool,
        vocab_size: int | None = None,
    ) -> None:
        self.stream, self.num_samples = stream, num_samples
        self._rows, self._length, self._apart, self._vocab_size = rows, length, apart, vocab_size
        self._columns = torch.arange(length + 1)

    def batch(self, indices: Tensor) -> Batch:
        """These samples as rows."""
        firsts, lengths = self._rows(indices)
        tokens, is_start, unlearnt = self.stream.window(firsts, self._length + 1)
        if lengths is not None:
            beyond = self._columns >= lengths[:, None]
            tokens.masked_fill_(beyond, self.stream.end_id or 0)
            unlearnt = _either(unlearnt, beyond)
            # Padding is a document of its own, so that nothing attends to it.
            border = self._columns == lengths[:, None]
            is_start = border if is_start is None else (is_start & ~beyond) | border
        if self._vocab_size is not None:
            check_tokens(tokens, self._vocab_size, f"a batch with sample {int(indices[0])}")
        # After a boundary the next token is another document's: nothing before it could tell.
        unlearnt = _either(unlearnt, is_start)
        labels = tokens[:, 1:] if unlearnt is None else tokens[:, 1:].masked_fill(unlearnt[:, 1:], IGNORED)
        batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": labels.contiguous()}
        return batch | self._places(len(indices), is_start) if self._apart else batch

    def _places(self, num_rows: int, is_start: Tensor | None) -> Batch:
        """Which document each position belongs to, and where in it; a row counts from 0 wherever it begins."""
        columns = self._columns[:-1]
        if is_start is None:
            documents = torch.zeros(num_rows, len(columns), dtype=torch.int32)
            return {"document_ids": documents, "position_ids": columns.repeat(num_rows, 1)}
        is_start = is_start[:, :-1]
        begins = torch.where(is_start, columns, 0).cummax(1).values
        return {"document_ids": is_start.cumsum(1, dtype=torch.int32), "position_ids": columns - begins}


class DocumentSamples:
    """One document a row, cut or padded; tokenised when it is asked for."""

    def __init__(self, documents: Documents, tokenizer: Tokenizer, length: int) -> None:
        self.num_samples = len(documents)
        self._documents, self._tokenizer, self._length = documents, tokenizer, length

    def batch(self, indices: Tensor) -> Batch:
        """These documents as rows.

        Raises:
            ConfigError: One of them cannot be read.
        """
        documents = [self._documents[index] for index in indices.tolist()]
        end = self._tokenizer.end_id
        tokens = torch.full((len(documents), self._length + 1), end or 0)
        labels = torch.full_like(tokens, IGNORED)
        for row, (prompt, text) in enumerate(encode_documents(self._tokenizer, documents)):
            ids = [*prompt, *text, *([] if end is None else [end])][: self._length + 1]
            tokens[row, : len(ids)] = torch.tensor(ids)
            labels[row, len(prompt) : len(ids)] = tokens[row, len(prompt) : len(ids)]
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": labels[:, 1:].contiguous()}


def encode_documents(
    tokenizer: Tokenizer, documents: Sequence[Document]
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """The tokens of each prompt and text; a plain text begins its document, with a prompt the prompt does."""
    openings = tokenizer.encode_all([document.prompt or document.text for document in documents])
    answers = iter(tokenizer.encode_all([d.text for d in documents if d.prompt], starts=False))
    for document, opening in zip(documents, openings, strict=True):
        yield (opening, next(answers)) if document.prompt else (b"", opening)


class ReadySamples:
    """Items that a `module:callable` made: mappings of tensors, put together row by row.

    Args:
        items: Has a length and items; where it has `collate(items) -> mapping of tensors`, that makes the batch.
        name: Of the callable, for errors.
        vocab_size: Refuse token ids from here on.
    """

    def __init__(self, items: Records, name: str, vocab_size: int | None) -> None:
        self.num_samples = len(items)
        self._items, self._name, self._vocab_size = items, name, vocab_size
        self._collate: Callable[[list[Any]], Mapping[str, Any]] = getattr(items, "collate", self._stack)

    def batch(self, indices: Tensor) -> Batch:
        """These items as rows.

        Raises:
            ConfigError: They do not fit together.
        """
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
                f"items of {self._name} cannot be put together: {type(error).__name__}: {error}",
                where=f"data.source = {self._name}",
                why="an item is a mapping of tensors, with the same keys and shapes in every item",
                fix="give all items one shape, or give the object a method collate(items) that returns the batch",
            ) from error


Samples = StreamSamples | DocumentSamples | ReadySamples
"""Numbered samples; any of them can be asked for, by several threads at once."""


def _either(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return one if other is None else other if one is None else one | other


def check_tokens(tokens: Tensor, vocab_size: int, where: str) -> None:
    """Raise unless the model has a row for each of these.

    Raises:
        ConfigError: With the worst of them.
    """
    if not tokens.numel():
        return
    least, most = (int(bound) for bound in tokens.aminmax())
    if least < 0 or most >= vocab_size:
        raise ConfigError(
            f"the data holds token {least if least < 0 else most}, the model knows 0 to {vocab_size - 1}",
            where=where,
            why="every token id needs a row in the model's embedding",
            fix="name the model whose tokenizer made the data, or check data.token_dtype; "
            f"model_options.vocab_size = {most + 1} would do for this one",
        )
