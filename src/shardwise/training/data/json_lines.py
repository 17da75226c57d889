"""Lines of JSON in a file that may be larger than memory: found by their offsets, parsed when asked for."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CHUNK_BYTES = 1 << 22
_NEWLINE = 10
_BLANKS = (9, 13, 32)


class JsonLines:
    """The lines of a JSONL file, found by their offsets: 8 bytes of memory a line. Blank lines are none.

    Args:
        path: The file; it must not change while it is read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            # An empty file cannot be mapped.
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        self._starts = _line_starts(path, self._bytes)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Any:
        start = int(self._starts[index])
        end = self._bytes.find(b"\n", start)
        return parse_line(self._bytes[start : end if end >= 0 else len(self._bytes)])

    def lines(self) -> Iterator[bytes]:
        """In order and not parsed: much faster than asking for each."""
        with self.path.open("rb") as file:
            yield from (line for line in file if line.strip())

    def place(self, index: int) -> str:
        """`file:line`, as an editor counts."""
        chunks = _chunks(self.path, int(self._starts[index]))
        return f"{self.path}:{sum(int((chunk == _NEWLINE).sum()) for _, chunk in chunks) + 1}"


def parse_line(line: bytes) -> Any:
    """What the line holds; a ValueError says in a few words why it cannot be read."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (column {error.colno})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} (byte {error.start})") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _line_starts(path: Path, content: mmap.mmap | bytes) -> Tensor:
    """Where lines begin that are not blank."""
    if not content:
        return torch.zeros(0, dtype=torch.int64)
    whole = torch.from_file(str(path), size=len(content), dtype=torch.uint8)
    parts = [_not_blank(torch.zeros(1, dtype=torch.int64), whole, content)]
    for first, chunk in _chunks(path, len(content)):
        parts.append(_not_blank((chunk == _NEWLINE).nonzero().flatten() + (first + 1), whole, content))
    return torch.cat(parts)


def _not_blank(starts: Tensor, whole: Tensor, content: mmap.mmap | bytes) -> Tensor:
    starts = starts[starts < len(content)]
    heads = whole[starts]
    keep = heads != _NEWLINE
    for index in torch.isin(heads, torch.tensor(_BLANKS, dtype=torch.uint8)).nonzero().flatten().tolist():
        start = int(starts[index])
        end = content.find(b"\n", start)
        keep[index] = bool(content[start : end if end >= 0 else len(content)].strip())
    return starts[keep]


def _chunks(path: Path, size: int) -> Iterator[tuple[int, Tensor]]:
    """Pieces of the first `size` bytes of a file, so that what is computed from them stays small."""
    if size:
        whole = torch.from_file(str(path), size=size, dtype=torch.uint8)
        for first in range(0, size, _CHUNK_BYTES):
            yield first, whole[first : first + _CHUNK_BYTES]
