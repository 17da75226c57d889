"""Where samples lie in a stream: cut anywhere, whole documents only, or one document each."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.training.data.samples import Rows
from shardwise.training.data.stream import TokenStream

_CHUNK_TOKENS = 1 << 24
_CHUNK_DOCUMENTS = 1 << 16


def cut_anywhere(stream: TokenStream, length: int) -> tuple[Rows, int]:
    """Row i is the i-th stretch of `length` tokens, with the first token of the next as its last label.

    No token but the last few is left out; documents go on in the next row.
    """
    num_samples = max(0, (stream.num_tokens - 1) // length)
    return lambda indices: (indices * length, None), num_samples


def whole_documents(stream: TokenStream, length: int) -> tuple[Rows, int]:
    """Rows of as many documents as fit, in order; one that is longer than a row is cut.

    For prompts with responses: half a response without its prompt would teach nothing. Documents whose prompt
    fills a row alone are left out.

    Raises:
        ConfigError: All of them are.
    """
    firsts, used = array("q"), array("q")
    room = 0
    for start, end, num_prompt in _documents(stream):
        size = min(end - start, length + 1)
        if num_prompt >= size:
            room = 0  # nothing of it would be learnt; rows do not go across it
        elif size <= room:
            used[-1] += size
            room -= size
        else:
            firsts.append(start)
            used.append(size)
            # Behind a document that was cut, the stream goes on with its rest.
            room = length + 1 - size if size == end - start else 0
    if not firsts and stream.num_tokens:
        raise no_room(length)
    return _table(firsts, used)


def one_document(stream: TokenStream, length: int) -> tuple[Rows, int]:
    """Each row is one document, cut or padded."""
    starts = find_starts(stream)
    ends = torch.cat([starts[1:], torch.tensor([stream.num_tokens])])
    lengths = (ends - starts).clamp(max=length + 1)
    return lambda indices: (starts[indices], lengths[indices]), len(starts)


def no_room(length: int) -> ConfigError:
    """The error of data in which nothing is learnt."""
    return ConfigError(
        f"every document is empty, or its prompt alone fills a sequence of {length} tokens",
        where="data.sequence_length",
        why="a sequence begins with the prompt, and only what comes after it is learnt",
        fix="set a longer data.sequence_length, or shorten the prompts",
    )


def find_starts(stream: TokenStream) -> Tensor:
    """Where documents begin; in a stream without an index, by reading all of it once.

    Raises:
        ConfigError: Nothing says where documents end.
    """
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


def _documents(stream: TokenStream) -> Iterator[tuple[int, int, int]]:
    """Start, end and length of the prompt of each; a few at a time, since numbers of Python take much memory."""
    starts, prompts = stream.starts, stream.prompt_lengths
    assert starts is not None
    assert prompts is not None
    for first in range(0, len(starts), _CHUNK_DOCUMENTS):
        chunk = starts[first : first + _CHUNK_DOCUMENTS + 1].tolist()
        chunk += [stream.num_tokens] if first + _CHUNK_DOCUMENTS >= len(starts) else []
        yield from zip(chunk[:-1], chunk[1:], prompts[first : first + _CHUNK_DOCUMENTS].tolist(), strict=True)


def _table(firsts: array[int], used: array[int]) -> tuple[Rows, int]:
    first = torch.frombuffer(firsts, dtype=torch.int64) if firsts else torch.zeros(0, dtype=torch.int64)
    length = torch.frombuffer(used, dtype=torch.int64) if used else torch.zeros(0, dtype=torch.int64)
    return lambda indices: (first[indices], length[indices]), len(first)
