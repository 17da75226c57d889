"""Find the records of a zip stream that `torch.save` has written, and their bytes in it. No torch."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.errors import CheckpointError

LOCAL, CENTRAL, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
END64, LOCATOR64 = b"PK\x06\x06", b"PK\x06\x07"
MAX32 = 0xFFFFFFFF
"""Stands in a 32-bit field whose value is in a 64-bit one."""
_MAX_DIRECTORY_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Record:
    """Where one record of a stream lies."""

    header_offset: int
    """The byte of the stream at which its local header starts."""
    num_bytes: int
    name: str
    crc: int = 0
    """CRC-32 of its data; torch writes it and never looks at it, ours is 0 for tensors."""


class ZipIndex:
    """The directory of a stream that is already written.

    Args:
        read: Gives the bytes `[offset, offset + count)` of the stream.
        num_bytes: Of the stream.
        where: The file, for errors.
    """

    def __init__(self, read: Callable[[int, int], bytes], num_bytes: int, *, where: str) -> None:
        self._read, self._num_bytes, self._where = read, num_bytes, where
        self.records: dict[str, Record] = {}
        """By name, without the archive's own name in front."""
        self.archive = ""
        """That name: torch takes the name of the file it writes, without its ending."""
        count, size, begin = self._find_directory()
        if size > min(_MAX_DIRECTORY_BYTES, num_bytes) or begin + size > num_bytes or count * 46 > size:
            raise self._damaged("its directory has an impossible size")
        self._parse(read(begin, size), count)

    def read_record(self, name: str, limit: int) -> bytes:
        """All bytes of a small record."""
        offset, size = self.locate(name)
        if size > limit:
            raise self._damaged(f"its record {name} has {size:,} bytes, more than {limit:,}")
        return self._read(offset, size)

    def locate(self, name: str) -> tuple[int, int]:
        """The byte of the stream at which a record's data start, and how many there are."""
        if (record := self.records.get(name)) is None:
            raise self._damaged(f"it has no record {name}")
        head = self._read(record.header_offset, 30) if record.header_offset + 30 <= self._num_bytes else b""
        if head[:4] != LOCAL:
            raise self._damaged(f"its record {name} does not start where the directory says")
        label_bytes, extra_bytes = struct.unpack_from("<HH", head, 26)
        offset = record.header_offset + 30 + label_bytes + extra_bytes
        if offset + record.num_bytes > self._num_bytes:
            raise self._damaged(f"its record {name} ends beyond the end")
        return offset, record.num_bytes

    def _find_directory(self) -> tuple[int, int, int]:
        tail_bytes = min(self._num_bytes, 22 + 20 + 56)
        tail = self._read(self._num_bytes - tail_bytes, tail_bytes)
        at = tail.rfind(END)
        if at < 0 or len(tail) - at < 22:
            raise self._damaged("it has no end of a zip file")
        count, size, begin = struct.unpack_from("<HII", tail, at + 10)
        locator = tail[at - 20 : at] if at >= 20 else b""
        if locator[:4] == LOCATOR64:
            (at64,) = struct.unpack_from("<Q", locator, 8)
            end64 = self._read(at64, 56) if at64 + 56 <= self._num_bytes else b""
            if end64[:4] != END64:
                raise self._damaged("its 64-bit directory is not where it should be")
            count, size, begin = struct.unpack_from("<QQQ", end64, 32)
        return count, size, begin

    def _parse(self, directory: bytes, count: int) -> None:
        at = 0
        for _ in range(count):
            if directory[at : at + 4] != CENTRAL or at + 46 > len(directory):
                raise self._damaged("its directory is broken")
            (method,) = struct.unpack_from("<H", directory, at + 10)
            crc, packed, size = struct.unpack_from("<III", directory, at + 16)
            label_bytes, extra_bytes, comment_bytes = struct.unpack_from("<HHH", directory, at + 28)
            (offset,) = struct.unpack_from("<I", directory, at + 42)
            label = directory[at + 46 : at + 46 + label_bytes].decode("utf-8", "replace")
            extra = directory[at + 46 + label_bytes : at + 46 + label_bytes + extra_bytes]
            size, packed, offset = _with_zip64(extra, size, packed, offset)
            self.archive, _, name = label.partition("/")
            if method != 0 or packed != size:
                raise self._damaged(f"its record {name} is compressed, which torch.save never does")
            if name in self.records:
                raise self._damaged(f"it has two records {name}")
            self.records[name] = Record(offset, size, name, crc)
            at += 46 + label_bytes + extra_bytes + comment_bytes

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(
            "the file is no torch.save file, or a damaged one",
            where=self._where,
            why=why,
            fix="load an older checkpoint, or copy this one again",
        )


def _with_zip64(extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    """The three numbers, from the 64-bit field where the 32-bit ones are full."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            field = extra[at + 4 : at + 4 + length]
            wide = list(struct.unpack(f"<{len(field) // 8}Q", field[: len(field) // 8 * 8]))
            size = wide.pop(0) if size == MAX32 and wide else size
            packed = wide.pop(0) if packed == MAX32 and wide else packed
            offset = wide.pop(0) if offset == MAX32 and wide else offset
        at += 4 + length
    return size, packed, offset
