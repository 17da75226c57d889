"""One `torch.save` file a rank: FSDP1's SHARDED and LOCAL state dicts, and DTensor state dicts, put together.

Each file holds a rank's shards (ShardedTensor, DTensor, or flat pieces of optimizer state) and copies of what all
ranks share. Nothing is gathered: the result says which bytes of which file are which part of which tensor. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.checkpointing.contents import Contents, StoredTensor
from shardwise.checkpointing.flat.flat_params import FLAT_PARAM
from shardwise.checkpointing.formats.rank_file_names import DIGITS, Series, do_not_belong_together, find_series
from shardwise.checkpointing.formats.rank_merging import is_state, merge_ranks
from shardwise.checkpointing.pickles.state_tree import KeyPath
from shardwise.checkpointing.pickles.torch_files import TorchFile, read_torch_file
from shardwise.checkpointing.pickles.torch_refs import ShardedRef, TensorRef
from shardwise.checkpointing.storage import files
from shardwise.errors import CheckpointError


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
