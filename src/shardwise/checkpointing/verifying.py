"""verify_checkpoint(): every checksum, every chunk; and what damage a load must refuse."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardwise.checkpointing.contents import ITEM_BYTES, Contents, tensor_problem
from shardwise.checkpointing.formats.detect import open_checkpoint
from shardwise.checkpointing.formats.sharded import committed_steps, step_folder
from shardwise.checkpointing.pickles.zip_files import ZipIndex
from shardwise.checkpointing.storage import files
from shardwise.checkpointing.storage.memory import checksum_of_parts
from shardwise.errors import CheckpointError, listed
from shardwise.findings import Finding, Severity
from shardwise.progress import NoProgress, Progress

INCOMPLETE, SHARED_STATE, WRONG_FILE, MIXED_ORDER, UNSURE_ORDER = "SW331", "SW332", "SW333", "SW337", "SW338"
USE_THE_MODEL = "the model is whole: load it alone, without optimizers=, and let the optimizer start afresh"
_MAX_LISTED = 20
_PARAMS = re.compile(r"(?:per_rank\.(\d+)\.)?(.+)\.param_groups\.\d+\.params")


def unsound(contents: Contents) -> Iterator[Finding]:
    """What is impossible in the index of a checkpoint; nothing of the tensors is read."""
    mixed = mixed_order(contents)
    for prefix, text in mixed.items():
        yield _error(MIXED_ORDER, text, f"{contents.path}: {prefix}", USE_THE_MODEL)
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
        if problem := tensor_problem(tensor):
            fix = "copy the checkpoint again with the files of all ranks, or use another"
            yield _error(INCOMPLETE, f"{name} is not stored whole: {problem}", contents.path, fix)
    yield from _shared_states(contents)


def refuse_unsound(contents: Contents) -> None:
    """Raise if anything is impossible.

    Raises:
        CheckpointError: With everything that was found.
    """
    found = list(unsound(contents))
    if not found:
        return
    raise CheckpointError(
        f"the checkpoint is not whole: {len(found)} problem{'s' if len(found) > 1 else ''}",
        where=str(contents.path),
        why="\n".join(listed([finding.message for finding in found], _MAX_LISTED)),
        fix=found[0].fix,
    )


def mixed_order(contents: Contents) -> dict[str, str]:
    """Optimizers in a sharded checkpoint that lost state because ranks listed parameters in different orders.

    Their shards are stored by name and right, but plain tensors (`step`) were written by two ranks, or by none.

    Returns:
        By the optimizer's name in the checkpoint, what happened to it.
    """
    if contents.format != "sharded":
        return {}
    found: dict[str, str] = {}
    listed = _listed_parameters(contents)
    for prefix in dict.fromkeys(prefix for _, prefix, _ in listed):
        first = {name for rank, owner, names in listed if (rank, owner) == (None, prefix) for name in names}
        others = {name for rank, owner, names in listed if rank is not None and owner == prefix for name in names}
        if not others or not others <= first:
            continue
        start = f"{prefix}.state."
        stored = [name for name in contents.tensors if name.startswith(start)]
        twice = [name for name in stored if tensor_problem(contents.tensors[name])]
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
    """
    is_ours = contents.format == "full" and contents.details.get("has_our_names")
    if not is_ours or contents.world_size is not None:  # converted: from a checkpoint that goes by names
        return {}
    model = [name.removeprefix("model.") for name in contents.tensors if name.startswith("model.")]
    place = {name: index for index, name in enumerate(model)}
    found: dict[str, str] = {}
    for rank, prefix, names in _listed_parameters(contents):
        places = [place[name] for name in names if name in place]
        if rank is None and places != sorted(places):
            found[prefix] = (
                "the optimizer's parameters do not stand in the model's order: written by shardwise before 0.2.0, "
                "which mixed up moments if ranks listed parameters in different orders (groups built from sets)"
            )
    return found


def _listed_parameters(contents: Contents) -> list[tuple[str | None, str, list[str]]]:
    """Names of the parameters of each group: the rank where it differed from rank 0 (else None), optimizer, names."""
    found = [(_PARAMS.fullmatch(name), value) for name, value in contents.values.items()]
    return [
        (match[1], match[2], [*map(str, value)]) for match, value in found if match and isinstance(value, list | tuple)
    ]


def _shared_states(contents: Contents) -> Iterator[Finding]:
    """Two states of one parameter that are the same bytes: the later one overwrote the earlier.

    FSDP1's FULL optimizer state dict does that with `use_orig_params=True` unless it copies to another device: every
    state is gathered into the same buffer.
    """
    seen: dict[tuple[object, ...], str] = {}
    shared: list[tuple[str, str]] = []
    for name, tensor in contents.tensors.items():
        path = contents.structure.get(name, ())
        if len(path) < 3 or path[-3] != "state" or tensor.num_bytes <= 8 or len(tensor.chunks) != 1:
            continue
        chunk = tensor.chunks[0]
        first = seen.setdefault((path[:-1], chunk.file, chunk.offset, id(chunk.data)), name)
        if first != name:
            shared.append((first, name))
    if shared:
        yield _error(
            SHARED_STATE,
            f"{shared[0][0]} and {shared[0][1]} are the same bytes (so are {len(shared) - 1} other pairs of "
            "optimizer state): of each pair at least one is lost",
            contents.path,
            "save the optimizer again with SHARDED_STATE_DICT (FSDP1's FULL one is wrong on CPU with "
            "use_orig_params=True), or convert the model alone, to safetensors",
        )


def wrong_files(contents: Contents) -> Iterator[Finding]:
    """Files that are missing, or not as large as they were."""
    for file in file_names(contents):
        path = files.join(contents.folder, file)
        if problem := files.size_problem(path, contents.file_bytes.get(file)):
            yield _error(WRONG_FILE, f"the file {problem}", path)


def file_names(contents: Contents) -> list[str]:
    """Every file that the contents lie in, relative to the folder."""
    used = (chunk.file for tensor in contents.tensors.values() for chunk in tensor.chunks if chunk.file)
    return list(dict.fromkeys([*contents.file_bytes, *used]))


_READ_BYTES = 8 << 20
_Ranges = Sequence[tuple[int, int]]
_Digest = Callable[[files.FileReader, _Ranges], int]


@dataclass(frozen=True, slots=True)
class _Check:
    """Blocks of a file that must have their checksums."""

    file: str
    what: str
    """The tensor or record."""
    digest: _Digest
    blocks: Iterable[tuple[_Ranges, int]]
    """First byte and end of the ranges of each block, and its checksum."""


def _read(reader: files.FileReader, ranges: _Ranges) -> Iterator[bytes]:
    for begin, end in ranges:
        for start in range(begin, end, _READ_BYTES):
            yield reader.read(start, min(_READ_BYTES, end - start))


def _xxh3(reader: files.FileReader, ranges: _Ranges) -> int:
    return checksum_of_parts(_read(reader, ranges))


def _crc32(reader: files.FileReader, ranges: _Ranges) -> int:
    crc = 0
    for data in _read(reader, ranges):
        crc = zlib.crc32(data, crc)
    return crc


def _tensor_checks(contents: Contents) -> Iterator[_Check]:
    """The blocks of tensors, and in our own format the bytes between them, file by file."""
    extents: dict[str, dict[int, tuple[int, str, tuple[int, ...]]]] = {}
    for name, tensor in contents.tensors.items():
        for chunk in tensor.chunks:
            end = chunk.offset + chunk.spec.numel * ITEM_BYTES[tensor.dtype]
            if end > chunk.offset and chunk.checksums:
                extents.setdefault(chunk.file, {}).setdefault(chunk.offset, (end, name, chunk.checksums))
    step, frames = contents.block_bytes, contents.details.get("frames", {})
    for file, size in contents.file_bytes.items():
        between, at = [], 0
        for offset, (end, name, checksums) in sorted(extents.get(file, {}).items()):
            between.append((at, offset))
            at = end
            ranges = ([(start, min(start + step, end))] for start in range(offset, end, step))
            yield _Check(file, name, _xxh3, zip(ranges, checksums, strict=True))
        if file in frames:
            yield _Check(file, "what lies between the tensors", _xxh3, [([*between, (at, size)], frames[file])])


def _record_checks(contents: Contents) -> Iterator[_Check]:
    """The records of the checkpoint's `torch.save` streams that carry a CRC-32."""
    for file, streams in itertools.groupby(contents.streams, key=lambda stream: stream.file):
        path = files.join(contents.folder, file)
        with files.FileReader(path) as reader:
            for stream in streams:
                start = stream.offset
                index = ZipIndex(partial(_read_from, reader, start), stream.num_bytes, where=str(path))
                for name, record in index.records.items():
                    offset, num_bytes = index.locate(name)
                    if record.CRC:
                        what = f"the record {name}" + (f" of {stream.name}" if stream.name else "")
                        block = [(start + offset, start + offset + num_bytes)]
                        yield _Check(file, what, _crc32, [(block, record.CRC)])


def _read_from(reader: files.FileReader, start: int, offset: int, count: int) -> bytes:
    return reader.read(start + offset, count)


def _failures(contents: Contents, checks: Iterable[_Check], progress: Progress) -> Iterator[tuple[_Check, int, int]]:
    """Each check that fails, the number of damaged blocks, and the byte at which the first of them starts."""
    sizes = {file: files.size_of(files.join(contents.folder, file)) or 0 for file in file_names(contents)}
    progress.start(sum(sizes.values()), "verifying")
    try:
        for file, group in itertools.groupby(checks, key=lambda check: check.file):
            with files.FileReader(files.join(contents.folder, file)) as reader:
                for check in group:
                    bad = [
                        ranges[0][0] for ranges, expected in check.blocks if check.digest(reader, ranges) != expected
                    ]
                    if bad:
                        yield check, len(bad), bad[0]
            progress.advance(sizes.pop(file, 0))
    finally:
        progress.finish()


def refuse_damaged(contents: Contents, progress: Progress) -> None:
    """Raise if a `torch.save` stream of the checkpoint does not have the CRC-32 it carries.

    Raises:
        CheckpointError: Naming the file and the record.
    """
    for check, _, _ in _failures(contents, _record_checks(contents), progress):
        raise files.damaged(
            f"the checkpoint is damaged: {check.what} is not what was saved",
            files.join(contents.folder, check.file),
            "its CRC-32 differs: the disk, the network or a program has changed the file",
            "load an older checkpoint, or copy this one again; `shardwise ckpt verify` lists all damage",
        )


UNREADABLE, DAMAGED, UNCHECKED = "SW330", "SW334", "SW335"
_COPY_AGAIN = "copy the checkpoint again, or use another"


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
    if steps := committed_steps(place):
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
    checks = itertools.chain(_tensor_checks(contents) if contents.block_bytes else (), _record_checks(contents))
    for check, count, first in _failures(contents, checks, progress):
        blocks = f"{count} block{'s' if count > 1 else ''}"
        message = f"{check.what} is not what was saved: {blocks} with another checksum, the first at byte {first:,}"
        yield _error(DAMAGED, message, files.join(contents.folder, check.file))
    if contents.format == "dcp":
        yield from _longer_than_items(contents)
    if not contents.streams and not contents.block_bytes:
        yield Finding(
            code=UNCHECKED,
            message="the format has no checksums: sizes and shapes are right, but flipped bytes cannot be seen",
            where=str(contents.path),
            severity=Severity.NOTE,
            fix="convert it: what shardwise writes carries checksums",
        )


def _longer_than_items(contents: Contents) -> Iterator[Finding]:
    ends: dict[str, int] = {}
    for stream in contents.streams:
        ends[stream.file] = max(ends.get(stream.file, 0), stream.offset + stream.num_bytes)
    for file, end in ends.items():
        path = files.join(contents.folder, file)
        if (size := files.size_of(path)) is not None and size > end:
            yield _error(WRONG_FILE, f"the file has {size:,} bytes, but its items end at {end:,}", path)


def _error(code: str, message: str, where: object, fix: str = _COPY_AGAIN) -> Finding:
    return Finding(code=code, message=message, where=str(where), severity=Severity.ERROR, fix=fix)
