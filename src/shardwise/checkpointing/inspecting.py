"""verify_checkpoint(), inspect_checkpoint() and diff_checkpoints(): errors, contents and differences of checkpoints."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpointing import storage
from shardwise.checkpointing.contents import ITEM_BYTES, Contents
from shardwise.checkpointing.formats.detect import open_checkpoint
from shardwise.checkpointing.formats.fsdp1 import needs_model
from shardwise.checkpointing.formats.sharded import committed_steps, step_folder
from shardwise.checkpointing.formats.values import encode_value
from shardwise.checkpointing.names import find_sections, with_our_names
from shardwise.checkpointing.pickles.torch_files import ZipIndex
from shardwise.checkpointing.reading import read_chunk
from shardwise.errors import CheckpointError, listed
from shardwise.findings import Finding, Severity
from shardwise.progress import Progress
from shardwise.units import format_bytes, format_count

_log = logging.getLogger("shardwise.checkpointing")
_MAX_VALUE_CHARACTERS = 200
_RANDOM_STATE = re.compile(r"rng\.\d+\.(python|numpy)")
_INTERNAL = ("left_out", "flat_starts", "unnamed", "frames", "has_our_names")
UNREADABLE, INCOMPLETE, SHARED_STATE, WRONG_FILE = "SW330", "SW331", "SW332", "SW333"
DAMAGED, UNCHECKED, NEEDS_MODEL = "SW334", "SW335", "SW336"
_COPY_AGAIN = "copy the checkpoint again, or use another"
_READ_BYTES = 8 << 20
_Check = tuple[str, str, Callable[[Iterable[bytes]], int], Iterable[tuple[Sequence[tuple[int, int]], int]]]
"""A file, what is checked, the checksum function, and for each block its byte ranges and its expected checksum."""


def unsound(contents: Contents) -> Iterator[Finding]:
    """Yield the errors in the index of a checkpoint, without reading tensors."""
    for name, tensor in contents.tensors.items():
        if problem := tensor.problem():
            fix = "copy the checkpoint again with the files of all ranks, or use another"
            yield _error(INCOMPLETE, f"{name} is not stored whole: {problem}", contents.path, fix)
    # Two states of one parameter may be the same bytes: with `use_orig_params=True`, FSDP1's FULL optimizer state dict
    # gathers every state into the same buffer, unless it copies to another device.
    seen: dict[tuple[object, ...], str] = {}
    shared: list[tuple[str, str]] = []
    for name, tensor in contents.tensors.items():
        path = contents.path_of(name)
        if len(path) >= 3 and path[-3] == "state" and tensor.num_bytes > 8 and len(tensor.chunks) == 1:
            first = seen.setdefault((path[:-1], tensor.place), name)
            shared += [(first, name)] if first != name else []
    if shared:
        yield _error(
            SHARED_STATE,
            f"{shared[0][0]} and {shared[0][1]} are the same bytes (so are {len(shared) - 1} other pairs of "
            "optimizer state): of each pair at least one is lost",
            contents.path,
            "save the optimizer again with SHARDED_STATE_DICT (FSDP1's FULL one is wrong on CPU with "
            "use_orig_params=True), or convert the model alone, to safetensors",
        )


def refuse_unsound(contents: Contents) -> None:
    """Raise a CheckpointError with all errors in the index."""
    if found := list(unsound(contents)):
        raise CheckpointError(
            f"the checkpoint is not whole: {len(found)} problem{'s' if len(found) > 1 else ''}",
            where=str(contents.path),
            why="\n".join(listed([finding.message for finding in found], 20)),
            fix=found[0].fix,
        )


def wrong_files(contents: Contents) -> Iterator[Finding]:
    """Yield an error for each file that is missing or has the wrong size."""
    for file in file_names(contents):
        path = storage.join(contents.folder, file)
        if problem := storage.size_problem(path, contents.file_bytes.get(file)):
            yield _error(WRONG_FILE, f"the file {problem}", path)


def file_names(contents: Contents) -> list[str]:
    """Return every file of the contents, relative to the folder."""
    used = (chunk.file for tensor in contents.tensors.values() for chunk in tensor.chunks if chunk.file)
    return list(dict.fromkeys([*contents.file_bytes, *used]))


def _error(code: str, message: str, where: object, fix: str = _COPY_AGAIN) -> Finding:
    return Finding(code=code, message=message, where=str(where), severity=Severity.ERROR, fix=fix)


def _tensor_checks(contents: Contents) -> Iterator[_Check]:
    """Yield the checks of tensors and, in shardwise's format, of the bytes between tensors, file by file."""
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
            yield file, name, storage.checksum_of_parts, zip(ranges, checksums, strict=True)
        if file in frames:
            what, blocks = "what lies between the tensors", [([*between, (at, size)], frames[file])]
            yield file, what, storage.checksum_of_parts, blocks


def _record_checks(contents: Contents) -> Iterator[_Check]:
    """Yield the checks of records of `torch.save` streams that have a CRC-32."""

    def crc32(parts: Iterable[bytes]) -> int:
        return functools.reduce(lambda crc, data: zlib.crc32(data, crc), parts, 0)

    for file, streams in itertools.groupby(contents.streams, key=lambda stream: stream.file):
        path = storage.join(contents.folder, file)
        with storage.FileReader(path) as reader:
            for stream in streams:
                start = stream.offset
                read = functools.partial(lambda start, offset, count: reader.read(start + offset, count), start)
                index = ZipIndex(read, stream.num_bytes, where=str(path))
                for name, record in index.records.items():
                    offset, num_bytes = index.locate(name)
                    if record.CRC:
                        what = f"the record {name}" + (f" of {stream.name}" if stream.name else "")
                        yield file, what, crc32, [([(start + offset, start + offset + num_bytes)], record.CRC)]


def _failures(
    contents: Contents, checks: Iterable[_Check], progress: Progress | None
) -> Iterator[tuple[storage.Place, str, int, int]]:
    """Yield for each failed check: file, what was checked, number of damaged blocks, offset of the first."""
    sizes = {file: storage.size_of(storage.join(contents.folder, file)) or 0 for file in file_names(contents)}
    with storage.counting(progress, sum(sizes.values()), "verifying") as count:
        for file, group in itertools.groupby(checks, key=lambda check: check[0]):
            path = storage.join(contents.folder, file)
            with storage.FileReader(path) as reader:
                for _, what, digest, blocks in group:
                    bad = [ranges[0][0] for ranges, expected in blocks if digest(_read(reader, ranges)) != expected]
                    if bad:
                        yield path, what, len(bad), bad[0]
            count(sizes.pop(file, 0))


def _read(reader: storage.FileReader, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    for begin, end in ranges:
        for start in range(begin, end, _READ_BYTES):
            yield reader.read(start, min(_READ_BYTES, end - start))


def refuse_damaged(contents: Contents, progress: Progress | None) -> None:
    """Raise if a record of the checkpoint's `torch.save` streams does not match its CRC-32."""
    for path, what, _, _ in _failures(contents, _record_checks(contents), progress):
        raise storage.damaged(
            f"the checkpoint is damaged: {what} is not what was saved",
            path,
            "its CRC-32 differs: the disk, the network or a program has changed the file",
            "load an older checkpoint, or copy this one again; `shardwise ckpt verify` lists all damage",
        )


def verify_checkpoint(path: str | Path, *, progress: Progress | None = None) -> list[Finding]:
    """Verify files, sizes, coverage of tensors, and every byte that has a checksum.

    Args:
        path: A checkpoint of any format, or the folder of a run, to verify all its checkpoints.
        progress: Receives the bytes as they are read.

    Returns:
        The findings; empty if there are none. A note (`SW335`) is returned if the format has no checksums, so that
        flipped bytes cannot be detected.

    Raises:
        CheckpointError: `path` does not exist.

    Ranks:
        Local.
    """
    place = storage.place(path)
    if not storage.exists(place):
        raise CheckpointError("there is no such file or folder", where=str(place), fix="check the path")
    steps = [step_folder(place, step) for step in committed_steps(place)]
    return [finding for folder in steps or [place] for finding in _verify(folder, progress)]


def _verify(place: storage.Place, progress: Progress | None) -> list[Finding]:
    try:
        contents = open_checkpoint(place)
        findings = [*unsound(contents), *wrong_files(contents)]
        if not any(finding.code == WRONG_FILE for finding in findings):
            findings += _damaged(contents, progress)
        return findings
    except CheckpointError as error:
        message = f"{error.what}: {error.why}" if error.why else error.what
        return [_error(UNREADABLE, message, error.where or str(place), error.fix or _COPY_AGAIN)]


def _damaged(contents: Contents, progress: Progress | None) -> Iterator[Finding]:
    checks = itertools.chain(_tensor_checks(contents) if contents.block_bytes else (), _record_checks(contents))
    for path, what, count, first in _failures(contents, checks, progress):
        blocks = f"{count} block{'s' if count > 1 else ''}"
        message = f"{what} is not what was saved: {blocks} with another checksum, the first at byte {first:,}"
        yield _error(DAMAGED, message, path)
    ends: dict[str, int] = {}
    for stream in contents.streams if contents.format == "dcp" else ():
        ends[stream.file] = max(ends.get(stream.file, 0), stream.offset + stream.num_bytes)
    for file, end in ends.items():
        path = storage.join(contents.folder, file)
        if (size := storage.size_of(path)) is not None and size > end:
            yield _error(WRONG_FILE, f"the file has {size:,} bytes, but its items end at {end:,}", path)
    if not contents.streams and not contents.block_bytes:
        message = "the format has no checksums: sizes and shapes are right, but flipped bytes cannot be seen"
        fix = "convert it: what shardwise writes carries checksums"
        yield Finding(code=UNCHECKED, message=message, where=str(contents.path), severity=Severity.NOTE, fix=fix)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSummary:
    """One tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    num_pieces: int
    """Number of stored chunks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """Contents of a checkpoint, for `print` or `to_dict`."""

    path: str
    format: str
    step: int | None
    world_size: int | None
    num_elements: int
    """Elements of the model's parameters and buffers; tied ones are counted once."""
    num_bytes: int
    """Bytes of all tensors."""
    disk_bytes: int
    """Bytes of all files of the checkpoint."""
    is_checksummed: bool
    dtypes: Mapping[str, int]
    """Bytes by dtype."""
    sections: Mapping[str, tuple[int, int]]
    """Number of tensors and bytes by top-level name, such as `model` and `optim`."""
    tensors: tuple[TensorSummary, ...]
    values: Mapping[str, str]
    """Small values, as text."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Values of classes that are not supported and never instantiated, each with the reason."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Metadata such as mesh, plan and versions, if the format has it."""
    findings: tuple[Finding, ...] = ()
    """Errors found in the index; `verify_checkpoint` also reads the tensors."""

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON.

        Ranks:
            Local.
        """
        return {
            **{name: getattr(self, name) for name in self.__slots__},
            "sections": {name: {"tensors": count, "bytes": size} for name, (count, size) in self.sections.items()},
            "tensors": [
                {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape), "bytes": tensor.num_bytes,
                 "pieces": tensor.num_pieces}
                for tensor in self.tensors
            ],
            "findings": [asdict(finding) for finding in self.findings],
        }  # fmt: skip

    def __str__(self) -> str:
        facts = [f"{self.path}: {self.format}"]
        facts += [f"step {self.step}"] if self.step is not None else []
        facts += [f"{self.world_size} ranks"] if self.world_size is not None else []
        facts += [f"{format_bytes(self.num_bytes)} of tensors", f"{format_bytes(self.disk_bytes)} on disk"]
        facts += ["checksummed" if self.is_checksummed else "no checksums of ours"]
        lines = [", ".join(facts)]
        lines += [f"model: {format_count(self.num_elements)} elements"] if self.num_elements else []
        for name, (count, size) in self.sections.items():
            lines.append(f"  {name}: {count} tensors, {format_bytes(size)}")
        lines += [f"  {dtype}: {format_bytes(size)}" for dtype, size in self.dtypes.items()]
        lines += [f"  left out: {name} ({why})" for name, why in self.left_out.items()]
        lines += [str(finding) for finding in self.findings] or ["nothing wrong in the index"]
        return "\n".join(lines)


def inspect_checkpoint(path: str | Path, *, model: nn.Module | None = None) -> Inspection:
    """Describe a checkpoint: names, shapes, dtypes, bytes, step, ranks, and errors in its index.

    Args:
        path: A checkpoint of any format, or the folder of a run, for its latest checkpoint.
        model: The model's definition, if the files do not name the parameters; otherwise flat parameters are listed.

    Raises:
        CheckpointError: The format is unknown, or the index is damaged.

    Ranks:
        Local.
    """
    contents = open_checkpoint(path, model=model)
    named = with_our_names(contents)
    dtypes, counts, sizes = Counter[str](), Counter[str](), Counter[str]()
    for name, tensor in named.tensors.items():
        section = str(named.path_of(name)[0])
        counts[section] += 1
        sizes[section] += tensor.num_bytes
        dtypes[tensor.dtype] += tensor.num_bytes
    findings = [*unsound(contents), *wrong_files(contents)]
    if needs_model(contents):
        message = "parameters are flat, or numbered: the files do not say which is which"
        fix = "pass the model to see and to convert them: --model MODEL"
        where = str(contents.path)
        findings.append(Finding(code=NEEDS_MODEL, message=message, where=where, severity=Severity.NOTE, fix=fix))
    return Inspection(
        path=str(contents.path),
        format=contents.format,
        step=named.step,
        world_size=contents.world_size,
        num_elements=_num_elements(contents),
        num_bytes=contents.num_bytes,
        disk_bytes=sum(storage.size_of(storage.join(contents.folder, file)) or 0 for file in file_names(contents)),
        is_checksummed=bool(contents.block_bytes),
        dtypes=dict(dtypes),
        sections={section: (count, sizes[section]) for section, count in counts.items()},
        tensors=tuple(
            TensorSummary(
                name=name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                num_bytes=tensor.num_bytes,
                num_pieces=len(tensor.chunks),
            )
            for name, tensor in contents.tensors.items()
        ),
        values={name: _short(value) for name, value in contents.values.items()},
        left_out=dict(contents.details.get("left_out", {})),
        details={key: value for key, value in contents.details.items() if key not in _INTERNAL},
        findings=tuple(findings),
    )


def _num_elements(contents: Contents) -> int:
    root, _ = find_sections(contents)
    seen: set[object] = set()
    total = 0
    for name, tensor in contents.tensors.items():
        if contents.path_of(name)[:-1] == root and (tensor.shape, tensor.place) not in seen:
            seen.add((tensor.shape, tensor.place))
            total += math.prod(tensor.shape)
    return total


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else text[: _MAX_VALUE_CHARACTERS - 3] + "..."


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """A tensor that differs between two checkpoints."""

    name: str
    what: str
    """`shape`, `dtype` or `values`."""
    a: str
    b: str
    largest: float | None = None
    """Largest absolute difference of an element; nan if only one of the two elements is nan."""
    num_elements: int = 0
    """Number of elements that differ."""

    def __str__(self) -> str:
        if self.what != "values":
            return f"{self.name}: {self.what} {self.a} against {self.b}"
        return f"{self.name}: {self.num_elements:,} elements differ, by at most {self.largest:.6g} ({self.a}, {self.b})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Differences between two checkpoints."""

    a: str
    b: str
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]
    values: tuple[str, ...]
    """Names of values that are not equal."""
    num_equal: int
    """Number of tensors that are bitwise equal."""

    @property
    def is_empty(self) -> bool:
        """Whether the checkpoints are equal."""
        return not (self.only_in_a or self.only_in_b or self.tensors or self.values)

    @property
    def largest(self) -> TensorDifference | None:
        """The tensor with the largest difference."""
        found = [tensor for tensor in self.tensors if tensor.largest is not None]
        return max(found, key=lambda tensor: (tensor.largest != tensor.largest, tensor.largest), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return {**asdict(self), "equal": self.is_empty}

    def __str__(self) -> str:
        lines = [f"{self.num_equal} tensors are equal, {len(self.tensors)} differ"]
        lines += [f"only in {self.a}: {name}" for name in self.only_in_a]
        lines += [f"only in {self.b}: {name}" for name in self.only_in_b]
        lines += [str(tensor) for tensor in self.tensors]
        lines += [f"{name}: not the same value" for name in self.values]
        if (largest := self.largest) is not None:
            lines.append(f"largest difference: {largest.largest:.6g} in {largest.name}")
        return "\n".join(lines)


def diff_checkpoints(
    a: str | Path, b: str | Path, *, model: nn.Module | None = None, progress: Progress | None = None
) -> Difference:
    """Compare two checkpoints of any formats and numbers of ranks.

    A checkpoint with only weights is compared with the weights of the other. Differing random states of Python and
    NumPy are logged but not counted: programs often seed only torch.

    Args:
        a: The first checkpoint.
        b: The second checkpoint.
        model: The model's definition, if a checkpoint does not name its parameters.
        progress: Receives the compared bytes.

    Ranks:
        Local. At most about 128 MiB of tensors are in memory.
    """
    left, right = (with_our_names(open_checkpoint(path, model=model)) for path in (a, b))
    if _only_weights(left) != _only_weights(right):
        left, right = _weights(left), _weights(right)
    shared = [name for name in left.tensors if name in right.tensors]
    found: list[TensorDifference] = []
    with storage.counting(progress, sum(left.tensors[name].num_bytes for name in shared), "comparing") as count:
        for name in shared:
            found += _tensor_differences(left, right, name)
            count(left.tensors[name].num_bytes)
    unseeded = [each.name for each in found if _RANDOM_STATE.fullmatch(each.name)]
    found = [each for each in found if each.name not in unseeded]
    opaque, others_opaque = (contents.details.get("left_out", {}) for contents in (left, right))
    for name in unseeded:
        _log.warning("%s differs; not counted: a program that does not seed it starts each time with another", name)
    for name in opaque.keys() & others_opaque.keys():
        _log.warning("%s is in both, but not compared: %s", name, opaque[name])
    names, others = {**left.tensors, **left.values, **opaque}, {**right.tensors, **right.values, **others_opaque}
    return Difference(
        a=str(a),
        b=str(b),
        only_in_a=tuple(name for name in names if name not in others),
        only_in_b=tuple(name for name in others if name not in names),
        tensors=tuple(found),
        values=tuple(
            name for name, value in left.values.items() if name in right.values and _differ(value, right.values[name])
        ),
        num_equal=len(shared) - len({difference.name for difference in found}) - len(unseeded),
    )


def _differ(one: object, other: object) -> bool:
    """Whether two stored values differ; NaN equals itself, and arrays are compared as a whole."""
    try:
        return encode_value(one) != encode_value(other)
    except CheckpointError:  # a placeholder of an object that is never instantiated
        return repr(one) != repr(other)


def _only_weights(contents: Contents) -> bool:
    return all(name.startswith("model.") for name in (*contents.tensors, *contents.values))


def _weights(contents: Contents) -> Contents:
    tensors = {name: tensor for name, tensor in contents.tensors.items() if name.startswith("model.")}
    return replace(contents, tensors=tensors, values={}, details={})


def _tensor_differences(left: Contents, right: Contents, name: str) -> Iterator[TensorDifference]:
    one, other = left.tensors[name], right.tensors[name]
    if one.shape != other.shape:
        yield TensorDifference(name=name, what="shape", a=str(list(one.shape)), b=str(list(other.shape)))
        return
    if one.dtype != other.dtype:
        yield TensorDifference(name=name, what="dtype", a=one.dtype, b=other.dtype)
    largest, count = 0.0, 0
    for spec in one.portions():
        most, differing = _compare_parts(read_chunk(left, one, spec), read_chunk(right, other, spec))
        largest = most if most != most or most > largest else largest
        count += differing
    if count:
        yield TensorDifference(
            name=name, what="values", a=one.dtype, b=other.dtype, largest=largest, num_elements=count
        )


def _compare_parts(one: torch.Tensor, other: torch.Tensor) -> tuple[float, int]:
    """Return the largest difference and the number of differing elements; equal bytes never differ."""
    if one.dtype == other.dtype and storage.bytes_of(one) == storage.bytes_of(other):
        return 0.0, 0
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    a, b = one.to(wide), other.to(wide)
    differs = (a != b) & ~(a.isnan() & b.isnan())
    count = int(differs.sum())
    if not count:
        return 0.0, 0
    distances = (a - b).abs()[differs]
    return (float("nan") if bool(distances.isnan().any()) else float(distances.max())), count
