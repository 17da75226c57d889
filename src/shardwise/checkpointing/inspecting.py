"""What is in a checkpoint, whoever wrote it: read as far as its index, with what is plainly wrong with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checkpointing.contents import Contents
from shardwise.checkpointing.flat.unflattening import needs_model
from shardwise.checkpointing.formats.detect import open_checkpoint
from shardwise.checkpointing.soundness import file_names, unsound, wrong_files
from shardwise.checkpointing.state.sections import find_sections, with_our_names
from shardwise.checkpointing.storage import files
from shardwise.findings import Finding, Severity
from shardwise.units import format_bytes, format_count

if TYPE_CHECKING:
    from torch import nn

_MAX_VALUE_CHARACTERS = 200
_NEEDS_MODEL = "SW336"
_INTERNAL = ("left_out", "metadata", "flat_starts", "unnamed", "dcp_folders", "has_our_names")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSummary:
    """One tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    num_pieces: int
    """In how many parts it is stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What a checkpoint holds. `print` it, or `to_dict()` it."""

    path: str
    format: str
    step: int | None
    world_size: int | None
    num_elements: int
    """Of the model's parameters and buffers, tied ones once."""
    num_bytes: int
    """Of all tensors."""
    disk_bytes: int
    """Of all files that hold them."""
    is_checksummed: bool
    dtypes: Mapping[str, int]
    """Bytes by dtype."""
    sections: Mapping[str, tuple[int, int]]
    """Tensors and bytes under each top-level name, such as `model` and `optim`."""
    tensors: tuple[TensorSummary, ...]
    values: Mapping[str, str]
    """Small values, as text."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Values of other classes, which are never made from a checkpoint."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Mesh, plan, versions and the like, where the format has them."""
    findings: tuple[Finding, ...] = ()
    """What is wrong as far as the index tells; `verify_checkpoint` reads the rest."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        plain = {
            name: getattr(self, name) for name in self.__slots__ if name not in ("tensors", "findings", "sections")
        }
        return {
            **plain,
            "sections": {name: {"tensors": count, "bytes": size} for name, (count, size) in self.sections.items()},
            "tensors": [
                {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape), "bytes": tensor.num_bytes,
                 "pieces": tensor.num_pieces}
                for tensor in self.tensors
            ],
            "findings": [
                {"code": finding.code, "severity": finding.severity.value, "message": finding.message,
                 "where": finding.where, "fix": finding.fix}
                for finding in self.findings
            ],
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
    """Say what is in a checkpoint: names, shapes, dtypes, bytes, step, ranks, and what is plainly wrong.

    Args:
        path: A checkpoint of any format; the folder of a run means its latest.
        model: Its definition, where the files do not name the parameters; without it flat parameters are shown.

    Raises:
        CheckpointError: It is of no known format, or its index is damaged.

    Ranks:
        Local.
    """
    contents = open_checkpoint(path, model=model)
    named = with_our_names(contents)
    dtypes: dict[str, int] = {}
    sections: dict[str, tuple[int, int]] = {}
    for name, tensor in named.tensors.items():
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + tensor.num_bytes
        top = str(named.structure.get(name, (name,))[0])
        count, size = sections.get(top, (0, 0))
        sections[top] = (count + 1, size + tensor.num_bytes)
    findings = [*unsound(contents), *wrong_files(contents), *_nameless(contents)]
    return Inspection(
        path=str(contents.path),
        format=contents.format,
        step=named.step,
        world_size=contents.world_size,
        num_elements=_num_elements(contents),
        num_bytes=contents.num_bytes,
        disk_bytes=sum(files.size_of(files.join(contents.folder, file)) or 0 for file in file_names(contents)),
        is_checksummed=bool(contents.block_bytes),
        dtypes=dtypes,
        sections=sections,
        tensors=tuple(
            TensorSummary(
                name=name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                num_bytes=tensor.num_bytes,
                num_pieces=len(tensor.pieces),
            )
            for name, tensor in contents.tensors.items()
        ),
        values={name: _short(value) for name, value in contents.values.items()},
        left_out=dict(contents.details.get("left_out", {})),
        details={key: value for key, value in contents.details.items() if key not in _INTERNAL},
        findings=tuple(findings),
    )


def _num_elements(contents: Contents) -> int:
    root = find_sections(contents).model
    seen: set[object] = set()
    total = 0
    for name, tensor in contents.tensors.items():
        place = (tensor.shape, *((piece.file, piece.offset, id(piece.data)) for piece in tensor.pieces))
        if contents.structure.get(name, (name,))[:-1] == root and place not in seen:
            seen.add(place)
            total += math.prod(tensor.shape)
    return total


def _nameless(contents: Contents) -> list[Finding]:
    if not needs_model(contents):
        return []
    return [
        Finding(
            code=_NEEDS_MODEL,
            message="parameters are flat, or numbered: the files do not say which is which",
            where=str(contents.path),
            severity=Severity.NOTE,
            fix="pass the model to see and to convert them: --model MODEL",
        )
    ]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else text[: _MAX_VALUE_CHARACTERS - 3] + "..."
