"""One safetensors file while it is written: a header with blanks, the tensors, then the checksums. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from shardwise.checkpointing.formats.safetensors import DTYPES, HEADER_CHECKSUM_KEY, MAX_HEADER_BYTES, METADATA_KEY
from shardwise.checkpointing.formats.tensor_info import TensorInfo
from shardwise.checkpointing.storage import files
from shardwise.checkpointing.storage.block_hashing import BlockHasher
from shardwise.checkpointing.storage.checksums import BLOCK_BYTES, checksum, to_hex
from shardwise.errors import CheckpointError

LARGE_BYTES = 64 << 20
"""From here on a file that is synced anyhow is written past the page cache."""
NAMES = {torch_name: name for name, torch_name in DTYPES.items()}
"""torch's names of dtypes, and the format's."""
_BLANK = "0" * 16
_ALIGNMENT = 64


class SafetensorsFile:
    """One file while it is written.

    Args:
        path: Must not be there yet.
        tensors: In the order in which their bytes will come.
        fsync: `finish` returns only when the disk has it.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorInfo], fsync: bool) -> None:
        self._path, self._tensors, self._fsync = path, list(tensors), fsync
        self._checksums: dict[str, tuple[int, ...]] = {tensor.name: () for tensor in tensors}
        self._hasher = BlockHasher()
        self._waiting = [(tensor.name, tensor.num_bytes) for tensor in tensors if tensor.num_bytes]
        is_large = fsync and sum(tensor.num_bytes for tensor in tensors) >= LARGE_BYTES
        self._file = files.create(path, large=is_large)
        self._is_open = True
        self._file.append([self._header(is_final=False)])

    @property
    def is_complete(self) -> bool:
        """Whether all bytes have come."""
        return not self._waiting

    def write(self, name: str, data: memoryview) -> None:
        """The next bytes of tensor `name`."""
        if not len(data):
            return
        expected, left = self._waiting[0] if self._waiting else ("nothing", 0)
        if name != expected or len(data) > left:
            raise AssertionError(f"{len(data)} bytes of {name} came where {left} of {expected} were due")
        self._file.append([data])
        self._hasher.update(data)
        self._waiting[0] = (name, left - len(data))
        if left == len(data):
            self._checksums[name] = self._hasher.finish()
            self._waiting.pop(0)

    def finish(self) -> None:
        """Close, and fill the checksums in."""
        if self._waiting:
            name, left = self._waiting[0]
            raise AssertionError(f"{left:,} bytes of {name} did not come")
        if self._fsync:
            self._file.sync()
        self.close()
        with files.os_errors("write the file", self._path), open(self._path, "r+b") as file:
            file.write(self._header(is_final=True))
            file.flush()
            if self._fsync:
                os.fsync(file.fileno())

    def close(self) -> None:
        """Give the file back."""
        if self._is_open:
            self._is_open = False
            self._file.close()

    def _header(self, *, is_final: bool) -> bytes:
        """Of the same length whether the checksums are known or not."""
        blocks = {tensor.name: -(-tensor.num_bytes // BLOCK_BYTES) for tensor in self._tensors}
        digests = {name: to_hex(self._checksums[name]) if is_final else _BLANK * blocks[name] for name in blocks}
        ours = json.dumps({"block_bytes": BLOCK_BYTES, "xxh3": digests}, separators=(",", ":"))
        header: dict[str, object] = {"__metadata__": {"format": "pt", HEADER_CHECKSUM_KEY: _BLANK, METADATA_KEY: ours}}
        end = 0
        for tensor in self._tensors:
            offsets = [end, end + tensor.num_bytes]
            end = offsets[1]
            header[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
        data = json.dumps(header, separators=(",", ":")).encode()
        data += b" " * (-(8 + len(data)) % _ALIGNMENT)
        if len(data) > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"the header would have {len(data):,} bytes",
                where=str(self._path),
                why=f"safetensors allows {MAX_HEADER_BYTES:,}",
                fix="pass a smaller max_shard_bytes",
            )
        if is_final:
            data = data.replace(f'"{_BLANK}"'.encode(), f'"{checksum(data):016x}"'.encode(), 1)
        return len(data).to_bytes(8, "little") + data
