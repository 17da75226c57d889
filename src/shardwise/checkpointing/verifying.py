"""verify_checkpoint(): every checksum, every chunk; and what damage a load must refuse."""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from shardwise.checkpointing.contents import ITEM_BYTES, Box, Contents, StoredTensor, coverage_problem
from shardwise.checkpointing.formats.detect import open_checkpoint
from shardwise.checkpointing.formats.sharded import read_frames
from shardwise.checkpointing.formats.sharded_commit import committed_steps, step_folder
from shardwise.checkpointing.pickles.dcp_metadata import read_dcp_metadata
from shardwise.checkpointing.pickles.zip_files import ZipIndex
from shardwise.checkpointing.storage import files
from shardwise.checkpointing.storage.memory import checksum
from shardwise.errors import CheckpointError
from shardwise.findings import Finding, Severity
from shardwise.progress import NoProgress, Progress

INCOMPLETE, SHARED_STATE, WRONG_FILE, MIXED_ORDER, UNSURE_ORDER = "SW331", "SW332", "SW333", "SW337", "SW338"
USE_THE_MODEL = "the model is whole: load it alone, without optimizers=, and let the optimizer start afresh"
_MAX_LISTED = 20
_PARAMS = re.compile(r"(?:per_rank\.(\d+)\.)?(.+)\.param_groups\.(\d+)\.params")


def unsound(contents: Contents) -> Iterator[Finding]:
    """What is impossible in the index of a checkpoint; nothing of the tensors is read.

    Ranks:
        Local.
    """
    mixed = mixed_order(contents)
    for prefix, text in mixed.items():
        yield Finding(
            code=MIXED_ORDER,
            message=text,
            where=f"{contents.path}: {prefix}",
            severity=Severity.ERROR,
            fix=USE_THE_MODEL,
        )
    for prefix, text in unsure_order(contents).items():
        yield Finding(
            code=UNSURE_ORDER,
            message=text,
            where=f"{contents.path}: {prefix}",
            severity=Severity.WARNING,
            fix=f"if that was so, {USE_THE_MODEL}",
        )
    for name, tensor in contents.tensors.items():
        if name.startswith(tuple(f"{prefix}.state." for prefix in mixed)):
            continue
        if problem := _problem(tensor):
            yield Finding(
                code=INCOMPLETE,
                message=f"{name} is not stored whole: {problem}",
                where=str(contents.path),
                severity=Severity.ERROR,
                fix="copy the checkpoint again with the files of all ranks, or use another",
            )
    yield from _shared_states(contents)


def refuse_unsound(contents: Contents) -> None:
    """Raise if anything is impossible.

    Raises:
        CheckpointError: With everything that was found.

    Ranks:
        Local.
    """
    found = list(unsound(contents))
    if not found:
        return
    lines = [finding.message for finding in found[:_MAX_LISTED]]
    hidden = len(found) - len(lines)
    raise CheckpointError(
        f"the checkpoint is not whole: {len(found)} problem{'s' if len(found) > 1 else ''}",
        where=str(contents.path),
        why="\n".join([*lines, *([f"... and {hidden} more"] if hidden else [])]),
        fix=found[0].fix,
    )


def mixed_order(contents: Contents) -> dict[str, str]:
    """Optimizers in a sharded checkpoint that lost state because ranks listed parameters in different orders.

    Their shards are stored by name and right, but plain tensors (`step`) were written by two ranks, or by none.

    Returns:
        By the optimizer's name in the checkpoint, what happened to it.

    Ranks:
        Local.
    """
    if contents.format != "sharded":
        return {}
    found: dict[str, str] = {}
    for prefix, lists in _listed_parameters(contents).items():
        first = [name for _, names in sorted(lists.get(None, {}).items()) for name in names]
        others = [group for rank, groups in lists.items() if rank is not None for group in groups.values()]
        if not others or any(name not in first for group in others for name in group):
            continue
        start = f"{prefix}.state."
        stored = [name for name in contents.tensors if name.startswith(start)]
        twice = [name for name in stored if _problem(contents.tensors[name])]
        keys = {name.rpartition(".")[2] for name in twice}
        having = {name.removeprefix(start).rpartition(".")[0] for name in stored}
        wanted = [f"{start}{name}.{key}" for name in first if name in having for key in keys]
        lost = [name for name in wanted if name not in contents.tensors]
        if twice:
            found[prefix] = (
                "ranks listed the optimizer's parameters in different orders when it was saved (shardwise before "
                f"0.2.0): {len(twice)} of its entries were stored twice and {len(lost)} not at all"
            )
    return found


def unsure_order(contents: Contents) -> dict[str, str]:
    """Optimizers in a full file of ours whose moments may belong to other parameters.

    Before 0.2.0 they were gathered in each rank's own order, and the file does not say whether ranks had the same.
    Since then parameters stand in the model's order.

    Returns:
        By the optimizer's name in the checkpoint, what may have happened to it.

    Ranks:
        Local.
    """
    is_ours = contents.format == "full" and contents.details.get("has_our_names")
    if not is_ours or contents.world_size is not None:  # converted: from a checkpoint that goes by names
        return {}
    model = [name.removeprefix("model.") for name in contents.tensors if name.startswith("model.")]
    place = {name: index for index, name in enumerate(model)}
    found: dict[str, str] = {}
    for prefix, lists in _listed_parameters(contents).items():
        for names in lists.get(None, {}).values():
            places = [place[name] for name in names if name in place]
            if places != sorted(places):
                found[prefix] = (
                    "the optimizer's parameters do not stand in the model's order: written by shardwise before 0.2.0, "
                    "which mixed up moments if ranks listed parameters in different orders (groups built from sets)"
                )
    return found


def _listed_parameters(contents: Contents) -> dict[str, dict[str | None, dict[int, list[str]]]]:
    """By optimizer, by rank where it differed from rank 0 (else None), by group: names of parameters."""
    listed: dict[str, dict[str | None, dict[int, list[str]]]] = {}
    for name, value in contents.values.items():
        if (match := _PARAMS.fullmatch(name)) and isinstance(value, (list, tuple)):
            rank, prefix, group = match.groups()
            listed.setdefault(prefix, {}).setdefault(rank, {})[int(group)] = [str(each) for each in value]
    return listed


def _problem(tensor: StoredTensor) -> str:
    return coverage_problem(Box.whole(tensor.shape), (piece.box for piece in tensor.pieces))


def _shared_states(contents: Contents) -> Iterator[Finding]:
    """Two states of one parameter that are the same bytes: the later one overwrote the earlier.

    FSDP1's FULL optimizer state dict does that with `use_orig_params=True` unless it copies to another device: every
    state is gathered into the same buffer.
    """
    seen: dict[tuple[object, ...], str] = {}
    shared: list[tuple[str, str]] = []
    for name, tensor in contents.tensors.items():
        path = contents.structure.get(name, ())
        if len(path) < 3 or path[-3] != "state" or tensor.num_bytes <= 8 or len(tensor.pieces) != 1:
            continue
        piece = tensor.pieces[0]
        first = seen.setdefault((path[:-1], piece.file, piece.offset, id(piece.data)), name)
        if first != name:
            shared.append((first, name))
    if shared:
        yield Finding(
            code=SHARED_STATE,
            message=f"{shared[0][0]} and {shared[0][1]} are the same bytes (so are {len(shared) - 1} other pairs of "
            "optimizer state): of each pair at least one is lost",
            where=str(contents.path),
            severity=Severity.ERROR,
            fix="save the optimizer again with SHARDED_STATE_DICT (FSDP1's FULL one is wrong on CPU with "
            "use_orig_params=True), or convert the model alone, to safetensors",
        )


def wrong_files(contents: Contents) -> Iterator[Finding]:
    """Files that are missing, or not as large as they were.

    Ranks:
        Local.
    """
    for file in file_names(contents):
        path = files.join(contents.folder, file)
        size, expected = files.size_of(path), contents.file_bytes.get(file)
        if size is None or (expected is not None and size != expected):
            state = "is missing" if size is None else f"has {size:,} bytes, but {expected:,} were written"
            yield Finding(
                code=WRONG_FILE,
                message=f"the file {state}",
                where=str(path),
                severity=Severity.ERROR,
                fix="copy the checkpoint again, or use another",
            )


def file_names(contents: Contents) -> list[str]:
    """Every file that the contents lie in, relative to the folder."""
    used = (piece.file for tensor in contents.tensors.values() for piece in tensor.pieces if piece.file)
    return list(dict.fromkeys([*contents.file_bytes, *used]))


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
        for start in range(0, num_bytes if record.CRC else 0, _CHUNK_BYTES):
            chunk = buffer[: min(_CHUNK_BYTES, num_bytes - start)]
            reader.read_into(stream.offset + offset + start, [chunk])
            crc = zlib.crc32(chunk, crc)
        if crc != record.CRC:
            yield DamagedRecord(stream, name)


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
