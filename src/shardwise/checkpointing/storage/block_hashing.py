"""Checksums of the blocks of a tensor whose bytes come in portions of any size. No torch."""

from __future__ import annotations

import xxhash

from shardwise.checkpointing.storage.checksums import BLOCK_BYTES


class BlockHasher:
    """Hears the bytes of one tensor after another."""

    def __init__(self) -> None:
        self._hash, self._hashed = xxhash.xxh3_64(), 0
        self._finished: list[int] = []

    def update(self, data: memoryview) -> None:
        """The next bytes of the tensor."""
        while len(data):
            part = data[: BLOCK_BYTES - self._hashed]
            self._hash.update(part)
            self._hashed += len(part)
            data = data[len(part) :]
            if self._hashed == BLOCK_BYTES:
                self._end_block()

    def finish(self) -> tuple[int, ...]:
        """The tensor is complete: its checksums, as `block_checksums` would give them. The next one begins."""
        if self._hashed:
            self._end_block()
        finished, self._finished = tuple(self._finished), []
        return finished

    def _end_block(self) -> None:
        self._finished.append(self._hash.intdigest())
        self._hash, self._hashed = xxhash.xxh3_64(), 0
