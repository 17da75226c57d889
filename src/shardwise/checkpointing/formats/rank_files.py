"""Folders with one torch file a rank, as FSDP1 scripts write them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.checkpointing.contents import Box, Contents, Piece, StoredTensor, TorchStream
from shardwise.checkpointing.formats.fsdp1 import FLAT_PARAM
from shardwise.checkpointing.pickles.torch_files import KeyPath, Ref, TorchFile, is_torch_file, read_torch_file
from shardwise.checkpointing.pickles.torch_objects import DTensorRef, ShardedRef, TensorRef
from shardwise.checkpointing.storage import files
from shardwise.errors import CheckpointError

DIGITS = re.compile(r"\d+")
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_WORLD_SIZE = re.compile(r"(?:of|world_size|ws)[-_]?(\d+)")


@dataclass(frozen=True, slots=True)
class Series:
    """Files that differ in nothing but the rank's number, by rank."""

    template: str
    names: tuple[str, ...]


def find_series(folder: files.Place) -> list[Series]:
    """The sets of per-rank files in a folder.

    Raises:
        CheckpointError: A rank's file is missing, or there are several checkpoints in the folder.

    Ranks:
        Local.
    """
    groups: dict[str, list[str]] = {}
    for name in files.names_in(folder):
        if name.endswith(_SUFFIXES) and DIGITS.search(name):
            groups.setdefault(DIGITS.sub("#", name), []).append(name)
    series = [_in_order(folder, template, names) for template, names in groups.items()]
    return [found for found in series if len(found.names) > 1 or is_torch_file(files.join(folder, found.names[0]))]


def do_not_belong_together(place: files.Place, why: str) -> CheckpointError:
    """The error for files that are not those of one checkpoint."""
    return CheckpointError(
        "the files of the ranks do not belong together",
        where=str(place),
        why=why,
        fix="put the files of one step, of all ranks, in a folder of their own",
    )


def _in_order(folder: files.Place, template: str, names: list[str]) -> Series:
    """The files by rank: the one number in which their names differ counts the ranks."""
    numbers = {name: tuple(map(int, DIGITS.findall(name))) for name in names}
    varying = [at for at in range(template.count("#")) if len({values[at] for values in numbers.values()}) > 1]
    if len(varying) > 1:
        raise do_not_belong_together(
            folder, f"the files {template} differ in {len(varying)} numbers: they are of several checkpoints"
        )
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
    return Series(template, tuple(names))


def is_state(path: KeyPath) -> bool:
    """Whether it is optimizer state, of which a rank has only that of the parameters it holds a part of."""
    return len(path) >= 3 and path[-3] == "state"


def merge_ranks(name: str, ranks: Sequence[TorchFile], path: KeyPath) -> StoredTensor:
    """One tensor out of all ranks' files.

    Args:
        name: In every file that has it.
        ranks: All files, by rank.
        path: Where it stood in the state dict.

    Raises:
        CheckpointError: The parts do not fit together.

    Ranks:
        Local.
    """
    here = [(rank, file, file.state.tensors[name]) for rank, file in enumerate(ranks) if name in file.state.tensors]
    kinds = {type(ref) for _, _, ref in here}
    if len(kinds) > 1:
        raise do_not_belong_together(here[0][1].place, f"{name} is of different kinds on different ranks")
    kind = kinds.pop()
    if kind is TensorRef:
        if is_state(path) and str(path[-2]).isdigit() and len(here[0][2].shape) == 1:
            return _concatenated(name, here)
        return _replicated(name, here)
    shapes = {(ref.dtype, ref.shape) for _, _, ref in here}
    if len(shapes) > 1:
        raise do_not_belong_together(here[0][1].place, f"{name} has different shapes or dtypes on different ranks")
    parts = _parts_of_sharded(here) if kind is ShardedRef else _parts_of_dtensor(name, here, len(ranks))
    pieces = tuple(file.piece(ref, box) for box, (file, ref) in parts.items())
    dtype, shape = shapes.pop()
    return StoredTensor(name, dtype, shape, pieces)


def _replicated(name: str, here: Sequence[tuple[int, TorchFile, Ref]]) -> StoredTensor:
    """A plain tensor: every rank has a copy, of which the first counts, as in `torch.distributed.checkpoint`."""
    _, file, ref = here[0]
    assert isinstance(ref, TensorRef)
    if other := next((other for _, _, other in here if other.shape != ref.shape), None):
        raise CheckpointError(
            f"{name} is a plain tensor of shape {ref.shape} on one rank and {other.shape} on another",
            where=str(file.place),
            why="it is a shard that does not say where it belongs, as `to_local()` gives",
            fix="save the ShardedTensor or DTensor itself, or a full state dict",
        )
    return StoredTensor(name, ref.dtype, ref.shape, (file.piece(ref, Box.whole(ref.shape)),))


def _concatenated(name: str, here: Sequence[tuple[int, TorchFile, Ref]]) -> StoredTensor:
    """Flat optimizer state: what the ranks hold, one after the other."""
    pieces: list[Piece] = []
    at = 0
    for _, file, ref in here:
        if not isinstance(ref, TensorRef) or len(ref.shape) != 1 or ref.dtype != here[0][2].dtype:
            raise do_not_belong_together(file.place, f"{name} is not flat on every rank")
        if ref.shape[0]:
            pieces.append(file.piece(ref, Box((at,), ref.shape)))
        at += ref.shape[0]
    return StoredTensor(name, here[0][2].dtype, (at,), tuple(pieces))


def _parts_of_sharded(here: Sequence[tuple[int, TorchFile, Any]]) -> dict[Box, tuple[TorchFile, TensorRef]]:
    return {box: (file, part) for _, file, ref in here for box, part in ref.parts if box.numel}


def _parts_of_dtensor(
    name: str, here: Sequence[tuple[int, TorchFile, Any]], num_ranks: int
) -> dict[Box, tuple[TorchFile, TensorRef]]:
    """The parts by box; replicas of a part count once."""
    parts: dict[Box, tuple[TorchFile, TensorRef]] = {}
    for rank, file, ref in here:
        box = _box_of(name, ref, rank, file)
        if ref.local.shape != box.sizes:
            raise do_not_belong_together(file.place, f"{name} has a part of shape {ref.local.shape}, not {box.sizes}")
        if box.numel:
            parts.setdefault(box, (file, ref.local))
    return parts


def _box_of(name: str, ref: DTensorRef, rank: int, file: TorchFile) -> Box:
    starts, sizes = [0] * len(ref.shape), list(ref.shape)
    coordinate = ref.coordinate if ref.coordinate is not None else _unravel(rank, ref.mesh_shape)
    if len(coordinate) != len(ref.mesh_shape):
        raise do_not_belong_together(file.place, f"{name} lies on a mesh of another shape than its rank")
    for placement, length, index in zip(ref.placements, ref.mesh_shape, coordinate, strict=True):
        if placement[0] == "replicate":
            continue
        if placement[0] != "shard" or placement[1] >= len(sizes) or index >= length:
            raise CheckpointError(
                f"{name} is placed as {placement[0]!r}, which is not read from per-rank files",
                where=str(file.place),
                why="its parts are interleaved over two mesh axes, or not yet summed",
                fix="save it with torch.distributed.checkpoint, and read that folder",
            )
        dim = placement[1]
        chunk = -(-sizes[dim] // length)  # as torch.chunk: the last ranks may hold less, or nothing
        begin = min(chunk * index, sizes[dim])
        starts[dim] += begin
        sizes[dim] = min(chunk, sizes[dim] - begin)
    return Box(tuple(starts), tuple(sizes))


def _unravel(rank: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The place of a rank in a mesh whose ranks are numbered row by row."""
    place: list[int] = []
    for length in reversed(shape):
        rank, index = divmod(rank, max(length, 1))
        place.insert(0, index)
    return tuple(place)


def read_rank_files(folder: files.Place) -> Contents:
    """Put the files of all ranks together.

    Args:
        folder: Holds one file a rank, or several (a model's and an optimizer's).

    Returns:
        The contents; the format is `fsdp1-local` where tensors are flat parameters, which need the model's
        definition to be told apart (see `unflattening.py`), else `fsdp1-sharded`.

    Raises:
        CheckpointError: A file is missing or damaged, or the files do not belong together.

    Ranks:
        Local.
    """
    found = find_series(folder)
    if not found:
        raise CheckpointError("there are no per-rank files", where=str(folder), fix="check the path")
    sizes = {len(series.names) for series in found}
    if len(sizes) > 1:
        counts = ", ".join(f"{len(series.names)} of {series.template}" for series in found)
        raise do_not_belong_together(folder, f"{counts}: each rank writes one of each")
    merged = _Merged(folder)
    for series in found:
        merged.add(series, [read_torch_file(files.join(folder, name)) for name in series.names])
    return merged.contents(sizes.pop())


class _Merged:
    """Names seen so far, over all series of a folder."""

    def __init__(self, folder: files.Place) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self.values: dict[str, Any] = {}
        self.structure: dict[str, KeyPath] = {}
        self.left_out: dict[str, str] = {}
        self.file_bytes: dict[str, int] = {}
        self.starts: dict[str | int, int | None] = {}
        """Where in its flat parameter each parameter starts, as far as the files show it."""
        self.is_local = False

    def add(self, series: Series, ranks: Sequence[TorchFile]) -> None:
        root = _root_of(ranks[0].state.structure)
        _check_alike(series, ranks)
        flat_slices = _slices_of_flat_params(ranks)
        self.starts |= {ranks[0].state.structure[name][-1]: start for name, start in flat_slices.items()}
        names: dict[str, None] = {}
        for file in ranks:
            self.file_bytes[file.name] = file.num_bytes
            names.update(dict.fromkeys(file.state.tensors))
        for name in names:
            if name in flat_slices:
                continue
            paths = [file.state.structure[name] for file in ranks if name in file.state.structure]
            tensor = merge_ranks(name, ranks, paths[0])
            self._place(root, name, paths[0], tensor)
            self.is_local |= _is_flat(paths[0]) or _is_numbered_state(paths[0], tensor)
        first = ranks[0].state
        for name, value in first.values.items():
            self._place(root, name, first.structure[name], value)
        self.left_out.update(first.left_out)

    def contents(self, world_size: int) -> Contents:
        return Contents(
            path=self.folder,
            format="fsdp1-local" if self.is_local else "fsdp1-sharded",
            tensors=self.tensors,
            values=self.values,
            file_bytes=self.file_bytes,
            world_size=world_size,
            details={"left_out": self.left_out, "flat_starts": self.starts},
            structure=self.structure,
            streams=tuple(TorchStream(file, 0, size) for file, size in self.file_bytes.items()),
        )

    def _place(self, root: KeyPath, name: str, path: KeyPath, entry: Any) -> None:
        full = ".".join([*map(str, root), name])
        if full in self.structure:
            raise do_not_belong_together(self.folder, f"two sets of files hold {full}")
        self.structure[full] = (*root, *path)
        if isinstance(entry, StoredTensor):
            self.tensors[full] = replace(entry, name=full)
        else:
            self.values[full] = entry


def _check_alike(series: Series, ranks: Sequence[TorchFile]) -> None:
    """Every file must hold what a rank holds, and be the file of the rank that its name says."""
    groups = [_param_groups(file) for file in ranks]
    for file, name in zip(ranks, series.names, strict=True):
        structure = file.state.structure
        if _root_of(structure) != _root_of(ranks[0].state.structure) or _param_groups(file) != groups[0]:
            raise do_not_belong_together(file.place, f"{name} holds something else than {series.names[0]}")
        written_as = file.archive + name[name.rfind(".") :]
        if written_as != name and DIGITS.sub("#", written_as) == series.template:
            raise do_not_belong_together(
                file.place, f"{name} was written as {written_as}: the files of two ranks were swapped"
            )
    every = {name for file in ranks for name in file.state.tensors if not is_state(file.state.structure[name])}
    for file in ranks:
        if missing := every - file.state.tensors.keys():
            raise do_not_belong_together(file.place, f"{min(missing)} is not in it, but in the file of another rank")


def _param_groups(file: TorchFile) -> dict[str, Any]:
    structure = file.state.structure
    return {name: value for name, value in file.state.values.items() if "param_groups" in structure[name][:-1]}


def _root_of(structure: Mapping[str, KeyPath]) -> KeyPath:
    """Where a file's dictionary belongs: an optimizer's, or a bare model's, is given the name it lacks."""
    tops = {path[0] for path in structure.values()}
    if tops == {"state", "param_groups"} or tops == {"param_groups"}:
        return ("optim",)
    return ("model",) if all(len(path) == 1 for path in structure.values()) else ()


def _slices_of_flat_params(ranks: Sequence[TorchFile]) -> dict[str, int | None]:
    """Names of LOCAL state dicts that only show a part of a flat parameter once more, and where they start in it.

    With `use_orig_params=True` a LOCAL state dict also lists every parameter: a 1-D view of the flat shard, or an
    empty tensor.
    """
    starts: dict[str, int | None] = {}
    for file in ranks:
        flat = {
            part.storage.key: box.starts[0] - part.offset
            for name, ref in file.state.tensors.items()
            if isinstance(ref, ShardedRef) and _is_flat(file.state.structure[name])
            for box, part in ref.parts
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


def _is_numbered_state(path: KeyPath, tensor: StoredTensor) -> bool:
    """Whether it is 1-D optimizer state of a parameter that has a number and no name: a flat one."""
    return is_state(path) and str(path[-2]).isdigit() and len(tensor.shape) == 1
