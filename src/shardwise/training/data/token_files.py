"""Files of tokens that were made before: mapped, and read only where a batch needs them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from shardwise.errors import ConfigError
from shardwise.training.data.problems import Problems
from shardwise.training.data.samples import check_tokens
from shardwise.training.data.stream import TokenStream
from shardwise.training.data.tokenizing import Bytes, Tokenizer

_NUM_WINDOWS = 64
_WINDOW_TOKENS = 1 << 16


def open_token_files(
    files: Sequence[Path], dtype_name: str, tokenizer: Tokenizer, vocab_size: int | None
) -> tuple[TokenStream, Tokenizer | None]:
    """Map files of plain token ids, one after the other.

    Args:
        files: Each holds ids and nothing else, in this machine's byte order.
        dtype_name: How an id is stored.
        tokenizer: As the config says; says which id ends a document.
        vocab_size: Tokens that the model knows.

    Returns:
        The stream, and the tokenizer if it can have made these tokens. (`bytes` is what a config says that says
        nothing; tokens beyond it were made by another, and then nothing is known of where documents end.)

    Raises:
        ConfigError: A file does not hold whole ids, or the model or the tokenizer does not know some of them. Of
            large files only parts are looked at here; `StreamSamples` looks at what it hands out.

    Ranks:
        Local.
    """
    dtype = getattr(torch, dtype_name)
    problems = Problems(
        "{num} file(s) do not hold whole tokens",
        why=f"a file of tokens holds {dtype.itemsize} byte(s) for each ({dtype_name}) and nothing else",
        fix="set data.token_dtype as the files were written, or write them again",
    )
    segments = []
    for file in files:
        size = file.stat().st_size
        if size % dtype.itemsize:
            problems.add(f"{file}: {size} bytes")
        elif size:
            segments.append(torch.from_file(str(file), shared=False, size=size // dtype.itemsize, dtype=dtype))
    problems.raise_any()
    stream = TokenStream(segments, starts=None, end_id=tokenizer.end_id)
    most = _check(stream, files, vocab_size)
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


def _check(stream: TokenStream, files: Sequence[Path], vocab_size: int | None) -> int:
    """The largest id that is seen in windows all over the stream (in all of it, where it is small)."""
    most = -1
    step = max(_WINDOW_TOKENS, stream.num_tokens // _NUM_WINDOWS)
    for first in range(0, stream.num_tokens, step):
        piece = stream.piece(first, _WINDOW_TOKENS)
        check_tokens(piece, vocab_size if vocab_size is not None else 1 << 62, _names(files))
        most = max(most, int(piece.max()))
    return most


def _names(files: Sequence[Path]) -> str:
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0]}{more}"
