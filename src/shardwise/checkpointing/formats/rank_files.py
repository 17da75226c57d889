"""Folders with one torch file per rank, as written by FSDP1 scripts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.checkpointing import storage
from shardwise.checkpointing.contents import ChunkSpec, Contents, KeyPath, StoredChunk, StoredTensor, TorchStream
from shardwise.checkpointing.formats.fsdp1 import FLAT_PARAM
from shardwise.checkpointing.pickles.machine import DTensorRef, ShardedRef, TensorRef
from shardwise.checkpointing.pickles.torch_files import Ref, TorchFile, is_torch_file, read_torch_file
from shardwise.errors import CheckpointError, listed

DIGITS = re.compile(r"\d+")
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_WORLD_SIZE = re.compile(r"(?:of|world_size|ws)[-_]?(\d+)")
_BEFORE_RANK, _AFTER_RANK = re.compile(r"(?:rank|shard|part)[-_.=]*$", re.I), re.compile(r"[-_.]?of[-_.]?$", re.I)
_BEFORE_STEP = re.compile(r"(?:epoch|step|iter(?:ation)?)s?[-_.=]*$", re.I)


def find_series(folder: storage.Place) -> list[list[str]]:
    """Return the sets of per-rank files in a folder, sorted by rank; names in a set differ only in the rank's number.

    Empty if files differ only in numbers and neither the names show that the numbers are ranks, nor the contents of
    any file are one rank's part.
    """
    groups: dict[str, list[str]] = {}
    for name in storage.names_in(folder):
        if name.endswith(TORCH_SUFFIXES) and DIGITS.search(name):
            groups.setdefault(_template(name), []).append(name)
    series = [names for names in groups.values() if len(names) > 1 or is_torch_file(storage.join(folder, names[0]))]
    others = [names for names in series if not _counts(names, _BEFORE_RANK, _AFTER_RANK)]
    if any(_counts(names, _BEFORE_STEP) for names in others):
        return []
    if others and not any(_holds_parts(storage.join(folder, names[0]), len(names)) for names in others):
        return []
    return [_in_order(folder, names) for names in series]


def _counts(names: list[str], before: re.Pattern[str], after: re.Pattern[str] | None = None) -> bool:
    """Whether the text before or after a differing number (any number, if there is one name) matches a pattern."""
    texts = DIGITS.split(names[0])
    return any(before.search(texts[at]) or (after is not None and after.match(texts[at + 1])) for at in _varying(names))


def _varying(names: list[str]) -> list[int]:
    """Return the positions of the numbers that differ between the names; all numbers of a single name."""
    numbers = zip(*(map(int, DIGITS.findall(name)) for name in names), strict=True)
    return [at for at, values in enumerate(numbers) if len(names) == 1 or len(set(values)) > 1]


def _holds_parts(place: storage.Place, num_files: int) -> bool:
    """Whether a file has one of `num_files` parts: sharded tensors, or only flat optimizer state."""
    state = read_torch_file(place).state
    refs = state.tensors.values()
    sizes = [math.prod(ref.mesh_shape) for ref in refs if isinstance(ref, DTensorRef)]
    if any(isinstance(ref, ShardedRef) for ref in refs) or any(size > 1 and num_files % size == 0 for size in sizes):
        return True
    is_flat = all(len(ref.shape) < 2 for ref in refs)
    return is_flat and not sizes and any(_is_numbered(state.structure[name]) for name in state.tensors)


def _template(name: str) -> str:
    return DIGITS.sub("#", name)


def _mismatch(place: storage.Place, why: str) -> CheckpointError:
    return CheckpointError(
        "the files of the ranks are not of one checkpoint",
        where=str(place),
        why=why,
        fix="put the files of one step, of all ranks, in a separate folder",
    )


def _in_order(folder: storage.Place, names: list[str]) -> list[str]:
    """Sort the files by rank, the one number in which their names differ; raise if files are missing."""
    template = _template(names[0])
    numbers = {name: tuple(map(int, DIGITS.findall(name))) for name in names}
    varying = _varying(names) if len(names) > 1 else []
    if len(varying) > 1:
        why = f"the files {template} differ in {len(varying)} numbers: they are of several checkpoints"
        raise _mismatch(folder, why)
    at = varying[0] if varying else 0
    names = sorted(names, key=lambda name: numbers[name][at])
    ranks = [numbers[name][at] for name in names]
    announced = _WORLD_SIZE.search(names[0])
    expected = max(int(announced[1]) if announced else 0, ranks[-1] + 1 if varying else 0)
    if expected > len(names):
        missing = sorted(set(range(expected)) - set(ranks))
        raise CheckpointError(
            f"the files of ranks {missing[:10]} are missing",
            where=f"{folder}: {template}",
            why=f"there should be {expected}; each rank wrote its own part of every tensor",
            fix="copy the missing files into the folder",
        )
    return names


def _is_state(path: KeyPath) -> bool:
    """Whether the path is that of optimizer state; a rank has only the state of its own shards."""
    return len(path) >= 3 and path[-3] == "state"


def _merge(name: str, ranks: Sequence[TorchFile], path: KeyPath) -> StoredTensor:
    """Merge one tensor, at `path` of the state dicts, from all ranks' files."""
    here = [(rank, file, file.state.tensors[name]) for rank, file in enumerate(ranks) if name in file.state.tensors]
    _, file, first = here[0]
    if len({type(ref) for _, _, ref in here}) > 1:
        raise _mismatch(file.place, f"{name} is of different kinds on different ranks")
    if isinstance(first, TensorRef) and _is_numbered(path) and len(first.shape) == 1:
        return _concatenated(name, [(file, ref) for _, file, ref in here])
    if not isinstance(first, TensorRef) and len({(ref.dtype, ref.shape) for _, _, ref in here}) > 1:
        raise _mismatch(file.place, f"{name} has different shapes or dtypes on different ranks")
    if other := next((ref for _, _, ref in here if ref.shape != first.shape), None):
        raise CheckpointError(
            f"{name} is a plain tensor of shape {first.shape} on one rank and {other.shape} on another",
            where=str(file.place),
            why="it is a local shard without its placement, as returned by `to_local()`",
            fix="save the ShardedTensor or DTensor itself, or a full state dict",
        )
    chunks: dict[ChunkSpec, StoredChunk] = {}
    for rank, file, ref in here:
        for spec, part in _parts(name, ref, rank, file):
            if spec not in chunks and (spec.numel or isinstance(ref, TensorRef)):
                chunks[spec] = file.chunk(part, spec)  # the first replica is used, as in DCP
    return StoredTensor(name, first.dtype, first.shape, tuple(chunks.values()))


def _parts(name: str, ref: Ref, rank: int, file: TorchFile) -> Sequence[tuple[ChunkSpec, TensorRef]]:
    """Return a rank's chunks of a tensor."""
    if isinstance(ref, TensorRef):
        return [(ChunkSpec.whole(ref.shape), ref)]
    if isinstance(ref, ShardedRef):
        return ref.parts
    spec = _spec_of_dtensor(name, ref, rank, file)
    if ref.local.shape != spec.sizes:
        raise _mismatch(file.place, f"{name} has a part of shape {ref.local.shape}, not {spec.sizes}")
    return [(spec, ref.local)]


def _concatenated(name: str, here: Sequence[tuple[TorchFile, Ref]]) -> StoredTensor:
    """Concatenate the ranks' flat optimizer state."""
    chunks: list[StoredChunk] = []
    at, dtype = 0, here[0][1].dtype
    for file, ref in here:
        if not isinstance(ref, TensorRef) or len(ref.shape) != 1 or ref.dtype != dtype:
            raise _mismatch(file.place, f"{name} is not flat on every rank")
        if ref.shape[0]:
            chunks.append(file.chunk(ref, ChunkSpec((at,), ref.shape)))
        at += ref.shape[0]
    return StoredTensor(name, dtype, (at,), tuple(chunks))


def _spec_of_dtensor(name: str, ref: DTensorRef, rank: int, file: TorchFile) -> ChunkSpec:
    starts, sizes = [0] * len(ref.shape), list(ref.shape)
    coordinate = ref.coordinate
    if coordinate is None:  # ranks are numbered in row-major order
        strides = [math.prod(ref.mesh_shape[axis + 1 :]) for axis in range(len(ref.mesh_shape))]
        coordinate = tuple(
            rank // max(stride, 1) % max(size, 1) for stride, size in zip(strides, ref.mesh_shape, strict=True)
        )
    if len(coordinate) != len(ref.mesh_shape):
        raise _mismatch(file.place, f"{name} lies on a mesh of another shape than its rank")
    for (kind, *dims), length, index in zip(ref.placements, ref.mesh_shape, coordinate, strict=True):
        if kind == "replicate":
            continue
        if kind != "shard" or dims[0] >= len(sizes) or index >= length:
            raise CheckpointError(
                f"{name} is placed as {kind!r}, which is not supported in per-rank files",
                where=str(file.place),
                why="its parts are interleaved over two mesh axes, or partial sums",
                fix="save it with torch.distributed.checkpoint, and read that folder",
            )
        count = -(-sizes[dims[0]] // length)  # as in torch.chunk: the last ranks may have fewer elements, or none
        begin = min(count * index, sizes[dims[0]])
        starts[dims[0]] += begin
        sizes[dims[0]] = min(count, sizes[dims[0]] - begin)
    return ChunkSpec(tuple(starts), tuple(sizes))


def read_rank_files(folder: storage.Place) -> Contents:
    """Merge the files of all ranks; a rank may have several (model and optimizer).

    The format is `fsdp1-local` if there are flat parameters, which need the model's definition or a recorded layout;
    otherwise `fsdp1-sharded`.
    """
    found = find_series(folder)
    if not found:
        names = [name for name in storage.names_in(folder) if name.endswith(TORCH_SUFFIXES)]
        raise CheckpointError(
            f"cannot tell which of {len(names)} torch files is the checkpoint",
            where=f"{folder}: {', '.join(listed(names))}",
            why="neither names (rank0.pt, 0-of-8.pt) nor contents show that they are the parts of one checkpoint",
            fix=f"give one file, as in {storage.join(folder, names[-1])}" if names else "check the path",
        )
    sizes = {len(series) for series in found}
    if len(sizes) > 1:
        counts = ", ".join(f"{len(series)} of {_template(series[0])}" for series in found)
        raise _mismatch(folder, f"{counts}: each rank writes one of each")
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, Any] = {}
    structure: dict[str, KeyPath] = {}
    left_out: dict[str, str] = {}
    file_bytes: dict[str, int] = {}
    starts: dict[str | int, int | None] = {}  # start of each parameter in its flat parameter, if the files show it
    is_local = False
    for series in found:
        ranks = [read_torch_file(storage.join(folder, name)) for name in series]
        _check_rank_files(ranks)
        file_bytes |= {file.name: file.num_bytes for file in ranks}
        first, root = ranks[0].state, _root_of(ranks[0].state.structure)
        paths = {name: path for file in reversed(ranks) for name, path in file.state.structure.items()}
        flat_slices = _slices_of_flat_params(ranks)
        starts |= {first.structure[name][-1]: start for name, start in flat_slices.items()}
        names = dict.fromkeys(name for file in ranks for name in file.state.tensors if name not in flat_slices)
        for name in (*names, *first.values):
            full = ".".join([*map(str, root), name])
            if full in structure:
                raise _mismatch(folder, f"two sets of files hold {full}")
            structure[full] = (*root, *paths[name])
            if name not in names:
                values[full] = first.values[name]
                continue
            tensors[full] = replace(_merge(name, ranks, paths[name]), name=full)
            is_local |= _is_flat(paths[name]) or (_is_numbered(paths[name]) and len(tensors[full].shape) == 1)
        left_out |= first.left_out
    return Contents(
        path=folder,
        format="fsdp1-local" if is_local else "fsdp1-sharded",
        tensors=tensors,
        values=values,
        file_bytes=file_bytes,
        world_size=sizes.pop(),
        details={"left_out": left_out, "flat_starts": starts},
        structure=structure,
        streams=tuple(TorchStream(file, 0, size) for file, size in file_bytes.items()),
    )


def _check_rank_files(ranks: Sequence[TorchFile]) -> None:
    """Raise unless every file contains a rank's state and matches the rank in its name."""
    first = ranks[0]
    for file in ranks:
        is_alike = _root_of(file.state.structure) == _root_of(first.state.structure)
        if not is_alike or _param_groups(file) != _param_groups(first):
            raise _mismatch(file.place, f"{file.name} holds something else than {first.name}")
        written_as = file.archive + file.name[file.name.rfind(".") :]
        if written_as != file.name and _template(written_as) == _template(first.name):
            why = f"{file.name} was written as {written_as}: the files of two ranks were swapped"
            raise _mismatch(file.place, why)
    every = {name for file in ranks for name in file.state.tensors if not _is_state(file.state.structure[name])}
    for file in ranks:
        if missing := every - file.state.tensors.keys():
            raise _mismatch(file.place, f"{min(missing)} is not in it, but in the file of another rank")


def _param_groups(file: TorchFile) -> dict[str, Any]:
    structure = file.state.structure
    return {name: value for name, value in file.state.values.items() if "param_groups" in structure[name][:-1]}


def _root_of(structure: Mapping[str, KeyPath]) -> KeyPath:
    """Return the path to prepend to a file's names: `optim` for an optimizer's state, `model` for a model's."""
    tops = {path[0] for path in structure.values()}
    if tops == {"state", "param_groups"} or tops == {"param_groups"}:
        return ("optim",)
    return ("model",) if all(len(path) == 1 for path in structure.values()) else ()


def _slices_of_flat_params(ranks: Sequence[TorchFile]) -> dict[str, int | None]:
    """Return tensors of LOCAL state dicts that repeat a part of a flat parameter, with their starts in it.

    With `use_orig_params=True` a LOCAL state dict also contains every parameter, as a 1-D view of the flat shard or
    an empty tensor.
    """
    starts: dict[str, int | None] = {}
    for file in ranks:
        flat = {
            part.storage.key: spec.starts[0] - part.offset
            for name, ref in file.state.tensors.items()
            if isinstance(ref, ShardedRef) and _is_flat(file.state.structure[name])
            for spec, part in ref.parts
        }
        has_flat = any(_is_flat(path) for path in file.state.structure.values())
        for name, ref in file.state.tensors.items():
            if not has_flat or not isinstance(ref, TensorRef) or len(ref.shape) != 1:
                continue
            if ref.shape == (0,):
                starts.setdefault(name, None)
            elif ref.storage.key in flat and starts.get(name) is None:
                starts[name] = flat[ref.storage.key] + ref.offset
    return starts


def _is_flat(path: KeyPath) -> bool:
    return str(path[-1]).rpartition(".")[2] == FLAT_PARAM


def _is_numbered(path: KeyPath) -> bool:
    """Whether the path is that of optimizer state of a parameter with an index instead of a name."""
    return _is_state(path) and str(path[-2]).isdigit()
