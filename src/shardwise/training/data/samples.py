"""What one sample is: a row of a batch, cut from the stream of tokens, from one document, or made by the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.training.data.records import Documents, Records
from shardwise.training.data.stream import TokenStream
from shardwise.training.data.tokenizing import Tokenizer

IGNORED = -100
"""The label of what is not learnt; cross-entropy's own default."""
Batch = dict[str, Tensor]
Rows = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""From numbers of samples to where each begins in the stream, and how many tokens it has; None: all that fit."""


class Samples(Protocol):
    """Numbered samples; any of them can be asked for, by several threads at once."""

    num_samples: int

    def batch(self, indices: Tensor) -> Batch:
        """These samples as rows, in memory of the CPU."""
        ...


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
        window = self.stream.window(firsts, self._length + 1)
        tokens, is_start, unlearnt = window.tokens, window.is_start, window.is_prompt
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
        prompts = self._encode([document.prompt for document in documents], starts=True)
        with_prompt = [bool(document.prompt) for document in documents]
        texts = [document.text for document in documents]
        beginning = iter(self._encode([t for t, p in zip(texts, with_prompt, strict=True) if not p], starts=True))
        following = iter(self._encode([t for t, p in zip(texts, with_prompt, strict=True) if p], starts=False))
        end = self._tokenizer.end_id
        tokens = torch.full((len(documents), self._length + 1), end or 0)
        labels = torch.full_like(tokens, IGNORED)
        for row, has_prompt in enumerate(with_prompt):
            prompt = prompts[row] if has_prompt else []
            text = next(following) if has_prompt else next(beginning)
            ids = [*prompt, *text, *([] if end is None else [end])][: self._length + 1]
            tokens[row, : len(ids)] = torch.tensor(ids)
            labels[row, len(prompt) : len(ids)] = tokens[row, len(prompt) : len(ids)]
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": labels[:, 1:].contiguous()}

    def _encode(self, texts: list[str], *, starts: bool) -> list[list[int]]:
        return [list(ids) for ids in self._tokenizer.encode_all(texts, starts=starts)]


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
