"""Text that every machine has: the bytes of Python's standard library. Quick to learn something from."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_FILES = ("argparse.py", "dataclasses.py", "difflib.py", "inspect.py", "tarfile.py", "typing.py")


@cache
def standard_library_bytes() -> Tensor:
    """A few large modules in a row, one byte a token."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join((folder / name).read_bytes() for name in _FILES if (folder / name).exists())
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def byte_batches(*, batch_size: int, sequence_length: int, seed: int, rank: int) -> Iterator[Tensor]:
    """Endless batches of random passages, (batch, length + 1) so that inputs and targets overlap by one.

    Ranks:
        Local. Each rank draws passages of its own.
    """
    text = standard_library_bytes()
    # Two numbers into one seed; a prime, so that no (seed, rank) pair of a usual run meets another.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    offsets = torch.arange(sequence_length + 1)
    while True:
        starts = torch.randint(0, len(text) - sequence_length - 1, (batch_size, 1), generator=generator)
        yield text[starts + offsets].long()
