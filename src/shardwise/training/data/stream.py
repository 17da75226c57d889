"""All tokens of all documents in one row, wherever they lie: in mapped files or in memory."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Window:
    """A few stretches of the stream, each a row."""

    tokens: Tensor
    """(rows, length) int64."""
    is_start: Tensor | None
    """(rows, length) bool: a document begins here, and not already with the row; None: nowhere."""
    is_prompt: Tensor | None
    """(rows, length) bool: the token is read and not learnt; None: all are learnt."""


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

    def window(self, firsts: Tensor, length: int) -> Window:
        """Rows that begin at `firsts`; beyond the end of the stream they hold zeros.

        Ranks:
            Local.
        """
        rows = [self._stretch(first, length) for first in firsts.tolist()]
        tokens = torch.stack(rows).to(torch.int64)
        if self._borders is None:
            return Window(tokens, self._starts_by_token(tokens), None)
        # One column more: the last token ends its document if the next begins another.
        document, is_start = self._documents(self._borders, firsts, length + 1)
        if is_start is not None and self._fill_ends:
            tokens.masked_fill_(is_start[:, 1:], self.end_id or 0)
        is_prompt = self._prompts(firsts, document, is_start, length)
        return Window(tokens, None if is_start is None else is_start[:, :-1], is_prompt)

    def piece(self, first: int, length: int) -> Tensor:
        """One stretch as it is stored, without ends filled in; for checks."""
        return self._stretch(first, min(length, self.num_tokens - first)).to(torch.int64)

    def _stretch(self, first: int, length: int) -> Tensor:
        """Tokens as they are stored; a view, where one segment holds them all."""
        index = bisect_right(self._offsets, first) - 1
        begin = first - self._offsets[index]
        part = self._segments[index][begin : begin + length]
        missing = length - len(part)
        if not missing:
            return part
        parts = [part]
        while missing and index + 1 < len(self._segments):
            index += 1
            parts.append(self._segments[index][:missing])
            missing -= len(parts[-1])
        return torch.cat([*parts, torch.zeros(missing, dtype=part.dtype)])

    def _starts_by_token(self, tokens: Tensor) -> Tensor | None:
        if self.end_id is None:
            return None
        is_start = torch.zeros_like(tokens, dtype=torch.bool)
        is_start[:, 1:] = tokens[:, :-1] == self.end_id
        return is_start

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
