"""Check `torch.save` streams by the CRC-32 that torch writes for every record, and that `torch.load` never looks at."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.checkpointing.contents import Contents
from shardwise.checkpointing.pickles.dcp_metadata import read_dcp_metadata
from shardwise.checkpointing.pickles.zip_index import ZipIndex
from shardwise.checkpointing.storage import files
from shardwise.errors import CheckpointError
from shardwise.progress import Progress

_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Stream:
    """One `torch.save` stream: a file, or an item of a Distributed Checkpoint file."""

    file: str
    offset: int
    num_bytes: int
    name: str
    """What it holds, for messages; empty when it is the whole file."""


@dataclass(frozen=True, slots=True)
class DamagedRecord:
    """A record whose bytes are not those that were written."""

    stream: Stream
    record: str


def streams_of(contents: Contents) -> list[Stream]:
    """The `torch.save` streams of a checkpoint that others wrote; none for formats of another kind.

    Ranks:
        Local.
    """
    streams: list[Stream] = []
    if contents.format in ("full", "fsdp1-full", "fsdp1-sharded", "fsdp1-local"):
        streams += [Stream(file, 0, size, "") for file, size in contents.file_bytes.items()]
    inside = ("",) if contents.format == "dcp" else contents.details.get("dcp_folders", ())
    for subfolder in inside:
        streams += _items_of(contents.folder, subfolder)
    return streams


def _items_of(folder: files.Place, subfolder: str) -> list[Stream]:
    metadata = read_dcp_metadata(files.join(folder, subfolder) if subfolder else folder)
    prefix = f"{subfolder}/" if subfolder else ""
    named = [(name, item) for name, tensor in metadata.tensors.items() for _, item in tensor.chunks]
    named += metadata.values.items()
    places = {
        (item.file, item.offset): Stream(prefix + item.file, item.offset, item.length, name)
        for name, item in named
        if item is not None
    }
    return sorted(places.values(), key=lambda stream: (stream.file, stream.offset))


def damaged_records(contents: Contents, streams: list[Stream], progress: Progress) -> Iterator[DamagedRecord]:
    """Read all records of the streams and compare them with their CRC-32.

    Raises:
        CheckpointError: A file is missing or is no zip stream.

    Ranks:
        Local.
    """
    progress.start(sum(stream.num_bytes for stream in streams), "verifying")
    try:
        for stream in streams:
            path = files.join(contents.folder, stream.file)
            with contextlib.closing(files.open_reader(path)) as reader:
                yield from _damaged_in(stream, reader, str(path))
            progress.advance(stream.num_bytes)
    finally:
        progress.finish()


def refuse_damaged(contents: Contents, progress: Progress) -> None:
    """Raise if a `torch.save` stream of the checkpoint does not have the CRC-32 it carries.

    Raises:
        CheckpointError: Naming the file and the record.

    Ranks:
        Local.
    """
    for damage in damaged_records(contents, streams_of(contents), progress):
        of = f" of {damage.stream.name}" if damage.stream.name else ""
        raise CheckpointError(
            f"the checkpoint is damaged: the record {damage.record}{of} is not what was saved",
            where=str(files.join(contents.folder, damage.stream.file)),
            why="its CRC-32 differs: the disk, the network or a program has changed the file",
            fix="load an older checkpoint, or copy this one again; `shardwise ckpt verify` lists all damage",
        )


def _damaged_in(stream: Stream, reader: files.Reader, where: str) -> Iterator[DamagedRecord]:
    def read(offset: int, count: int) -> bytes:
        data = bytearray(count)
        reader.read_into(stream.offset + offset, [memoryview(data)])
        return bytes(data)

    index = ZipIndex(read, stream.num_bytes, where=where)
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for name, record in index.records.items():
        offset, num_bytes = index.locate(name)
        crc = 0
        for start in range(0, num_bytes if record.crc else 0, _CHUNK_BYTES):
            chunk = buffer[: min(_CHUNK_BYTES, num_bytes - start)]
            reader.read_into(stream.offset + offset + start, [chunk])
            crc = zlib.crc32(chunk, crc)
        if crc != record.crc:
            yield DamagedRecord(stream, name)
