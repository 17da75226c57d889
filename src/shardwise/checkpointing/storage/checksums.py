"""XXH3-64 over blocks of bytes: fast enough (tens of GB/s) that nothing is ever read or written unchecked."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

BLOCK_BYTES = 1 << 20
"""Bytes under one checksum: small enough that a shard's ragged ends cost little, large enough for a short manifest."""


def checksum(data: bytes | bytearray | memoryview) -> int:
    """The checksum of one run of bytes."""
    return xxhash.xxh3_64_intdigest(data)


def checksum_of_parts(parts: Iterable[bytes | bytearray | memoryview]) -> int:
    """The checksum of bytes that lie in several places, as if they lay one after another."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()


def block_checksums(data: memoryview, block_bytes: int = BLOCK_BYTES) -> tuple[int, ...]:
    """One checksum for each block; the last block may be shorter. No bytes, no blocks."""
    return tuple(checksum(data[start : start + block_bytes]) for start in range(0, len(data), block_bytes))


def to_hex(checksums: Iterable[int]) -> str:
    """Sixteen hexadecimal digits for each checksum, one after another."""
    return "".join(f"{each:016x}" for each in checksums)


def from_hex(text: str) -> tuple[int, ...]:
    """The checksums that `to_hex` wrote.

    Raises:
        ValueError: The text is not that.
    """
    if len(text) % 16 or not set(text) <= set("0123456789abcdef"):
        raise ValueError("checksums are 16 lower-case hexadecimal digits each")
    return tuple(int(text[start : start + 16], 16) for start in range(0, len(text), 16))
