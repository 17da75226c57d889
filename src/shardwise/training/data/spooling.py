"""Tokenising once, into compact blocks of memory: what packing needs to know how long documents are."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from shardwise.progress import Progress
from shardwise.training.data.problems import Problems
from shardwise.training.data.records import Document, Documents, unreadable
from shardwise.training.data.stream import TokenStream
from shardwise.training.data.tokenizing import Bytes, Tokenizer

_BLOCK_TOKENS = 1 << 22
_MAP_BYTES = 1 << 20  # a smaller file is not worth a mapping of its own
_PIECE_CHARS = 1 << 20
_PIECES_TOGETHER = 8
_NUM_TOGETHER = 512
_DTYPES = {"B": torch.uint8, "H": torch.uint16, "i": torch.int32}


class Spool:
    """Documents in, a stream of tokens out.

    Args:
        tokenizer: Makes the tokens.
        progress: Hears of every document or file.
    """

    def __init__(self, tokenizer: Tokenizer, progress: Progress) -> None:
        self._tokenizer, self._progress = tokenizer, progress
        self._is_bytes = isinstance(tokenizer, Bytes)
        self._code = "B" if self._is_bytes else "H" if tokenizer.vocab_size <= 1 << 16 else "i"
        self._block = array(self._code)
        self._segments: list[Tensor] = []
        self._num_tokens = 0
        self._starts, self._prompt_lengths = array("q"), array("q")

    def add_files(self, files: Sequence[Path]) -> None:
        """Each file is a document.

        Raises:
            ConfigError: Some are no text.
        """
        problems = Problems(
            "{num} file(s) of the data are not text",
            why="what is neither JSONL nor tokens is read as UTF-8 text",
            fix="name only text files, as in data.source = 'folder/**/*.txt', or set data.format",
        )
        for file in files:
            try:
                self._add_file(file)
            except ValueError as error:
                problems.add(f"{file}: {error}")
            self._progress.advance()
        problems.raise_any()

    def add_documents(self, documents: Documents) -> None:
        """Each record is a document.

        Raises:
            ConfigError: Some cannot be read.
        """
        problems = unreadable()
        readable = documents.read_all(problems)
        while batch := list(islice(readable, _NUM_TOGETHER)):
            self._add_together(batch)
            self._progress.advance(len(batch))
        problems.raise_any()

    def stream(self) -> TokenStream:
        """Everything added, in order."""
        self._close_block()
        prompt_lengths = torch.frombuffer(self._prompt_lengths, dtype=torch.int64) if self._prompt_lengths else None
        return TokenStream(
            self._segments,
            starts=torch.frombuffer(self._starts, dtype=torch.int64) if self._starts else torch.zeros(0).long(),
            end_id=self._tokenizer.end_id,
            prompt_lengths=prompt_lengths if prompt_lengths is not None and bool(prompt_lengths.any()) else None,
            fill_ends=self._is_bytes,
        )

    def _add_together(self, batch: list[Document]) -> None:
        """Plain texts begin a document; with a prompt, the prompt does."""
        openings = self._tokenizer.encode_all([document.prompt or document.text for document in batch])
        answers = self._tokenizer.encode_all([d.text for d in batch if d.prompt], starts=False)
        remaining = iter(answers)
        for document, opening in zip(batch, openings, strict=True):
            answer = next(remaining) if document.prompt else b""
            if document.text:
                self._begin(len(opening) if document.prompt else 0)
                self._extend(opening)
                self._extend(answer)
                self._end()

    def _add_file(self, file: Path) -> None:
        size = file.stat().st_size
        if size == 0:
            return
        with file.open("rb") as opened:
            if b"\0" in opened.read(8192):
                raise ValueError("it has zero bytes")
        self._begin(0)
        if not self._is_bytes:
            for tokens in self._pieces(file):
                self._extend(tokens)
        elif size < _MAP_BYTES:
            self._extend(file.read_bytes())
        else:
            self._close_block()
            self._segments.append(torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8))
            self._num_tokens += size
        self._end()

    def _pieces(self, file: Path) -> Iterator[Sequence[int]]:
        """Tokens of a text that may be larger than memory; it is cut at ends of lines, where they are not too far."""
        with file.open(encoding="utf-8", newline="") as opened:
            pieces = iter(lambda: opened.read(_PIECE_CHARS) + opened.readline(_PIECE_CHARS), "")
            yield from self._tokenizer.encode_all(list(islice(pieces, 1)))
            while together := list(islice(pieces, _PIECES_TOGETHER)):
                yield from self._tokenizer.encode_all(together, starts=False)

    def _begin(self, prompt_length: int) -> None:
        self._starts.append(self._num_tokens)
        self._prompt_lengths.append(prompt_length)

    def _extend(self, tokens: Sequence[int]) -> None:
        if isinstance(tokens, bytes):
            self._block.frombytes(tokens)
        else:
            self._block.extend(tokens)
        self._num_tokens += len(tokens)
        if len(self._block) >= _BLOCK_TOKENS:
            self._close_block()

    def _end(self) -> None:
        if self._tokenizer.end_id is not None:
            self._block.append(0 if self._is_bytes else self._tokenizer.end_id)
            self._num_tokens += 1

    def _close_block(self) -> None:
        if self._block:
            self._segments.append(torch.frombuffer(self._block, dtype=_DTYPES[self._code]))
            self._block = array(self._code)
