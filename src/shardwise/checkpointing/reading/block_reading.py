"""Read bytes of a stored piece, whole blocks at a time, and compare their checksums. No torch."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Self

from shardwise.checkpointing.contents import ITEM_BYTES, Contents, Piece, StoredTensor
from shardwise.checkpointing.storage.checksums import checksum, checksum_of_parts
from shardwise.checkpointing.storage.files import Reader, join, open_reader
from shardwise.errors import CheckpointError

_MAX_OPEN = 32


class OpenFiles:
    """The files of a checkpoint, opened when first read; any thread may read any of them.

    Few are open at a time, however many ranks wrote the checkpoint: systems allow a process some thousand.
    """

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self._readers: dict[str, Reader] = {}
        self._users: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers.values():
            reader.close()

    @contextlib.contextmanager
    def using(self, file: str) -> Iterator[Reader]:
        """The open file; it stays open while the context is."""
        with self._lock:
            reader = self._readers.pop(file, None) or open_reader(join(self.contents.folder, file))
            self._readers[file] = reader  # last: those at the front were not needed for the longest time
            self._users[file] += 1
            self._close_unused()
        try:
            yield reader
        finally:
            with self._lock:
                self._users[file] -= 1

    def _close_unused(self) -> None:
        surplus = len(self._readers) - _MAX_OPEN
        for file in [file for file in self._readers if not self._users[file]][: max(surplus, 0)]:
            self._readers.pop(file).close()


class BlockReader:
    """Reads for one thread.

    Args:
        files: Shared by all threads.
        verify: Compare checksums, where the checkpoint has them.
    """

    def __init__(self, files: OpenFiles, *, verify: bool) -> None:
        self._files, self._verify = files, verify
        self._block_bytes = files.contents.block_bytes
        # What a part shares its first and last block with: read so that the block can be verified, then dropped.
        self._before = self._after = memoryview(b"")

    def read(self, tensor: StoredTensor, piece: Piece, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `piece` from its byte `start` on.

        Raises:
            CheckpointError: The file is missing, short or damaged.
        """
        if piece.data is not None:
            buffer[:] = piece.data[start : start + len(buffer)]
            return
        if not self._verify or not piece.checksums:
            with self._files.using(piece.file) as reader:
                reader.read_into(piece.offset + start, [buffer])
            return
        block, stop = self._block_bytes, start + len(buffer)
        begin = start // block * block
        end = min(-(-stop // block) * block, piece.box.numel * ITEM_BYTES[tensor.dtype])
        if (start > begin or end > stop) and not self._before:
            self._before, self._after = (memoryview(bytearray(block)) for _ in range(2))
        before, after = self._before[: start - begin], self._after[: end - stop]
        with self._files.using(piece.file) as reader:
            reader.read_into(piece.offset + begin, [before, buffer, after])
        for first in range(begin, end, block):
            last = min(first + block, end)
            inner = buffer[max(first - start, 0) : last - start]
            if first >= start and last <= stop:
                found = checksum(inner)
            else:
                parts = ([before] if first < start else []) + [inner] + ([after] if last > stop else [])
                found = checksum_of_parts(parts)
            if found != piece.checksums[first // block]:
                raise self._damaged(tensor, piece, first, last)

    def _damaged(self, tensor: StoredTensor, piece: Piece, first: int, last: int) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint is damaged: bytes of {tensor.name} are not those that were saved",
            where=f"{join(self._files.contents.folder, piece.file)}, "
            f"bytes {piece.offset + first:,} to {piece.offset + last:,}",
            why="their checksum differs: the disk, the network or a program has changed the file",
            fix="load an older checkpoint, or copy this one again; `shardwise ckpt verify` lists all damage",
        )
