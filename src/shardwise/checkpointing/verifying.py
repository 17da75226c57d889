"""Read a checkpoint through and say everything that is wrong with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from shardwise.checkpointing.contents import ITEM_BYTES, Contents
from shardwise.checkpointing.formats.detect import open_checkpoint
from shardwise.checkpointing.pickles.record_checks import Stream, damaged_records, streams_of
from shardwise.checkpointing.sharded.committing import committed_steps, step_folder
from shardwise.checkpointing.sharded.manifest import read_frames
from shardwise.checkpointing.soundness import WRONG_FILE, unsound, wrong_files
from shardwise.checkpointing.storage import files
from shardwise.checkpointing.storage.checksums import checksum
from shardwise.errors import CheckpointError
from shardwise.findings import Finding, Severity
from shardwise.progress import NoProgress, Progress

UNREADABLE, DAMAGED, UNCHECKED = "SW330", "SW334", "SW335"
_COPY_AGAIN = "copy the checkpoint again, or use another"


@dataclass(frozen=True, slots=True)
class _Extent:
    """Bytes of a file that belong to a tensor."""

    offset: int
    num_bytes: int
    checksums: tuple[int, ...]
    name: str


def verify_checkpoint(path: str | Path, *, progress: Progress | None = None) -> list[Finding]:
    """Check all that can be checked: files, sizes, coverage, and every byte that has a checksum.

    Args:
        path: A checkpoint of any format, or the folder of a run: then all its checkpoints.
        progress: Is told the bytes as they are read.

    Returns:
        Nothing when all is well. A note (`SW335`) says when a format has no checksums, so that flipped bytes cannot
        be seen.

    Raises:
        CheckpointError: There is nothing at `path`.

    Ranks:
        Local.
    """
    place = files.place(path)
    if not files.exists(place):
        raise CheckpointError("there is no such file or folder", where=str(place), fix="check the path")
    listener = progress or NoProgress()
    if isinstance(place, Path) and place.is_dir() and (steps := committed_steps(place)):
        return [finding for step in steps for finding in _verify(step_folder(place, step), listener)]
    return _verify(place, listener)


def _verify(place: files.Place, progress: Progress) -> list[Finding]:
    try:
        contents = open_checkpoint(place)
        findings = [*unsound(contents), *wrong_files(contents)]
        if not any(finding.code == WRONG_FILE for finding in findings):
            findings += _damaged(contents, progress)
        return findings
    except CheckpointError as error:
        message = f"{error.what}: {error.why}" if error.why else error.what
        return [_error(UNREADABLE, message, error.where or str(place), error.fix or _COPY_AGAIN)]


def _damaged(contents: Contents, progress: Progress) -> Iterator[Finding]:
    if contents.block_bytes:
        yield from _damaged_blocks(contents, progress)
    streams = streams_of(contents)
    for damage in damaged_records(contents, streams, progress):
        of = f" of {damage.stream.name}" if damage.stream.name else ""
        message = f"the record {damage.record}{of} does not have the CRC-32 that was written"
        yield _error(DAMAGED, message, str(files.join(contents.folder, damage.stream.file)))
    if contents.format == "dcp":
        yield from _longer_than_items(contents, streams)
    if not streams and not contents.block_bytes:
        yield Finding(
            code=UNCHECKED,
            message="the format has no checksums: sizes and shapes are right, but flipped bytes cannot be seen",
            where=str(contents.path),
            severity=Severity.NOTE,
            fix="convert it: what shardwise writes carries checksums",
        )


def _longer_than_items(contents: Contents, streams: list[Stream]) -> Iterator[Finding]:
    ends: dict[str, int] = {}
    for stream in streams:
        ends[stream.file] = max(ends.get(stream.file, 0), stream.offset + stream.num_bytes)
    for file, end in ends.items():
        path = files.join(contents.folder, file)
        if (size := files.size_of(path)) is not None and size > end:
            yield _error(WRONG_FILE, f"the file has {size:,} bytes, but its items end at {end:,}", str(path))


def _damaged_blocks(contents: Contents, progress: Progress) -> Iterator[Finding]:
    """Read every file once, from front to back."""
    extents: dict[str, dict[int, _Extent]] = {}
    for name, tensor in contents.tensors.items():
        for piece in tensor.pieces:
            num_bytes = piece.box.numel * ITEM_BYTES[tensor.dtype]
            if num_bytes:
                extent = _Extent(piece.offset, num_bytes, piece.checksums, name)
                extents.setdefault(piece.file, {}).setdefault(piece.offset, extent)  # a tied name is no second read
    frames = read_frames(contents.folder) if contents.format == "sharded" else {}
    sizes = {file: contents.file_bytes[file] for file in contents.file_bytes if file in extents or file in frames}
    progress.start(sum(sizes.values()), "verifying")
    try:
        for file, size in sizes.items():
            ordered = sorted(extents.get(file, {}).values(), key=lambda extent: extent.offset)
            yield from _scan(contents, file, ordered, size, frames.get(file))
            progress.advance(size)
    finally:
        progress.finish()


def _scan(contents: Contents, file: str, extents: list[_Extent], size: int, frame: int | None) -> Iterator[Finding]:
    path = files.join(contents.folder, file)
    around = xxhash.xxh3_64()
    at = 0
    with contextlib.closing(files.open_reader(path)) as reader:
        for extent in extents:
            if frame is not None:
                _hash_into(around, reader, at, extent.offset)
            bad = list(_bad_blocks(reader, extent, contents.block_bytes))
            if bad:
                start = extent.offset + bad[0] * contents.block_bytes
                yield _error(
                    DAMAGED,
                    f"{len(bad)} block{'s' if len(bad) > 1 else ''} of {extent.name} are not what was saved, "
                    f"the first at byte {start:,}",
                    str(path),
                )
            at = extent.offset + extent.num_bytes
        if frame is not None:
            _hash_into(around, reader, at, size)
    if frame is not None and around.intdigest() != frame:
        yield _error(DAMAGED, "the bytes between the tensors are not what was saved", str(path))


def _bad_blocks(reader: files.Reader, extent: _Extent, block_bytes: int) -> Iterator[int]:
    buffer = memoryview(bytearray(min(block_bytes, extent.num_bytes)))
    for number, expected in enumerate(extent.checksums):
        start = number * block_bytes
        block = buffer[: min(block_bytes, extent.num_bytes - start)]
        reader.read_into(extent.offset + start, [block])
        if checksum(block) != expected:
            yield number


def _hash_into(state: xxhash.xxh3_64, reader: files.Reader, start: int, end: int) -> None:
    while start < end:
        part = bytearray(min(1 << 20, end - start))
        reader.read_into(start, [memoryview(part)])
        state.update(part)
        start += len(part)


def _error(code: str, message: str, where: str, fix: str = _COPY_AGAIN) -> Finding:
    return Finding(code=code, message=message, where=where, severity=Severity.ERROR, fix=fix)
