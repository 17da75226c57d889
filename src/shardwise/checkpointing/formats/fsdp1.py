"""FSDP1's flat parameters, split into the original parameters, for checkpoints of LOCAL state dicts."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checkpointing import contents as checkpoint_contents
from shardwise.checkpointing import storage
from shardwise.checkpointing.contents import ITEM_BYTES, Contents, KeyPath, StoredChunk, StoredTensor, sizes_of
from shardwise.errors import CheckpointError
from shardwise.sharding.inventory import canonical_name

if TYPE_CHECKING:
    import torch
    from torch import nn


FLAT_PARAM = "_flat_param"
LAYOUT_FILE = "fsdp1_layout.json"
_MAX_LAYOUT_BYTES = 64 << 20
_ALIGNMENTS = (0, 4, 8, 2, 16, 1)
"""Possible alignments of parameters, in elements: none with `use_orig_params=False`, else 16 bytes of the dtype."""


@dataclass(frozen=True, slots=True)
class FlatEntry:
    """One parameter inside a flat parameter."""

    name: str
    shape: tuple[int, ...]
    start: int
    """Index of its first element in the flat parameter."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FlatUnit:
    """One flat parameter of a wrapped module, or one unflattened parameter."""

    name: str
    """Name of the wrapped module (empty for the root), or of the parameter."""
    entries: tuple[FlatEntry, ...]
    numel: int
    """Number of elements, with padding between and after parameters, but without the last rank's padding."""
    is_flat: bool = True


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Layout of all flat parameters of a model."""

    units: Mapping[str, FlatUnit]
    """Units by name of the wrapped module, in the order of `parameters()` of the wrapped model."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of all parameters, in the order of `parameters()` of the unwrapped model."""
    ties: Mapping[str, str]
    """Stored names of tied parameters, by their other names."""
    optimizer: tuple[str, ...] | None = None
    """Parameters or wrapped modules in the order of the optimizer's indices, if it was recorded."""


def layout_of_model(model: nn.Module, contents: Contents) -> FlatLayout:
    """Return the layout of a LOCAL checkpoint, given the model before FSDP1 wrapped it; may be on the meta device."""
    stored = flat_sizes(contents)
    modules = {canonical_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
    if unknown := [name for name in stored if name not in modules]:
        raise _wrong(contents, f"it has no module called {unknown[0]!r}, of which there is a flat parameter")
    owners: dict[int, str] = {}
    members: dict[str, list[tuple[str, Any]]] = {}
    ties: dict[str, str] = {}
    for unit in sorted(stored, key=lambda name: -len(name.split(".")) if name else 1):  # inner ones first
        members[unit] = []
        for name, parameter in _parameters(modules[unit], unit):
            if id(parameter) not in owners:
                owners[id(parameter)] = name
                members[unit].append((name, parameter))
            elif owners[id(parameter)] != name:
                ties.setdefault(name, owners[id(parameter)])
    whole = {name for name, tensor in contents.tensors.items() if len(tensor.chunks) == 1}
    units = {}
    for name in (name for name in modules if name in stored):  # in the order of parameters()
        kept = [(param, tuple(tensor.shape)) for param, tensor in members[name]]
        units[name] = _fit(name, kept, stored[name], contents, whole)
    shapes = {canonical_name(name): tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return FlatLayout(units, shapes, ties)


def read_layout(folder: storage.Place) -> FlatLayout | None:
    """Read the layout file that `record_flat_params` wrote beside the checkpoint; None if there is none."""
    place = storage.join(folder, LAYOUT_FILE)
    if storage.size_of(place) is None:
        return None
    with storage.parsing(f"{LAYOUT_FILE} cannot be read", place, "record it again, or pass the model"):
        recorded = json.loads(storage.read_small(place, _MAX_LAYOUT_BYTES))
        units = {unit["module"]: _recorded_unit(unit) for unit in recorded["units"]}
        optimizer = recorded.get("optimizer")
        shapes = {str(entry["name"]): sizes_of(entry["shape"]) for entry in recorded["params"]}
        ties = {str(name): str(stored) for name, stored in recorded.get("ties", {}).items()}
        return FlatLayout(units, shapes, ties, None if optimizer is None else tuple(map(str, optimizer)))


def flat_sizes(contents: Contents) -> dict[str, int]:
    """Return the number of elements of each flat parameter by name of the wrapped module."""
    modules = {name: _flat_module(contents, name) for name in contents.tensors}
    return {module: math.prod(contents.tensors[name].shape) for name, module in modules.items() if module is not None}


def _flat_module(contents: Contents, name: str) -> str | None:
    """Return the wrapped module of a flat parameter; None for any other tensor."""
    module, _, last = canonical_name(str(contents.path_of(name)[-1])).rpartition(".")
    return module if last == FLAT_PARAM else None


def _parameters(module: nn.Module, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield every parameter under a module in FSDP1's flattening order; tied ones under each of their names."""
    for path, submodule in module.named_modules(remove_duplicate=False):
        for name, parameter in submodule.named_parameters(recurse=False, remove_duplicate=False):
            yield canonical_name(".".join(part for part in (prefix, path, name) if part)), parameter


def _fit(
    module: str, members: Sequence[tuple[str, tuple[int, ...]]], numel: int, contents: Contents, whole: set[str]
) -> FlatUnit:
    """Return the only layout of the parameters that has the stored number of elements; raise if there is none."""
    # Parameters of ignored modules are not in the flat parameter: the checkpoint stores them separately.
    flattened = [(name, shape) for name, shape in members if f"model.{name}" not in whole and name not in whole]
    world_size = contents.world_size or 1
    shard_counts = [count for count in range(world_size, 0, -1) if world_size % count == 0]  # smaller: hybrid sharding
    found: dict[FlatUnit, None] = {}
    for candidates, alignment, num_shards in itertools.product((members, flattened), _ALIGNMENTS, shard_counts):
        unit = _lay_out(module, candidates, alignment, num_shards)
        if unit.numel == numel and _starts_agree(unit, contents):
            found[unit] = None
    if len(found) == 1:
        return next(iter(found))
    where = module or "the root module"
    if found:
        raise CheckpointError(
            f"the flat parameter of {where} can be cut into parameters in {len(found)} ways",
            where=str(contents.path),
            why="FSDP1 pads between parameters, and the size does not determine the padding",
            fix=f"record the layout where the model is: record_flat_params(model, folder) writes {LAYOUT_FILE}",
        )
    total = sum(math.prod(shape) for _, shape in members)
    raise _wrong(
        contents,
        f"the flat parameter of {where} has {numel:,} elements, and the model's {len(members)} parameters there "
        f"have {total:,}",
    )


def _starts_agree(unit: FlatUnit, contents: Contents) -> bool:
    """Whether the parameters' starts match those found in the files, if any."""
    shown = {canonical_name(str(name)): start for name, start in contents.details.get("flat_starts", {}).items()}
    return all(shown.get(entry.name) in (None, entry.start) for entry in unit.entries)


def _lay_out(module: str, members: Sequence[tuple[str, tuple[int, ...]]], alignment: int, num_shards: int) -> FlatUnit:
    entries, at = [], 0
    for name, shape in members:
        if alignment:
            at += -at % alignment
        entries.append(FlatEntry(name, shape, at))
        at += math.prod(shape)
    if alignment:
        at += -at % num_shards
    return FlatUnit(module, tuple(entries), at)


def _recorded_unit(unit: Mapping[str, Any]) -> FlatUnit:
    entries = tuple(
        FlatEntry(str(entry["name"]), sizes_of(entry["shape"]), int(entry["start"])) for entry in unit["params"]
    )
    if any(not 0 <= entry.start <= entry.start + entry.numel <= int(unit["numel"]) for entry in entries):
        raise ValueError("a parameter that does not lie in its flat parameter")
    return FlatUnit(str(unit["module"]), entries, int(unit["numel"]))


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """An optimizer in a checkpoint whose state is stored by parameter indices."""

    root: KeyPath
    groups: dict[str, list[int]]
    """Indices by flat name of each group's list of parameters."""
    states: dict[int, list[tuple[str, StoredTensor]]]
    """State tensors by index: pairs of key and tensor."""


def needs_model(contents: Contents) -> bool:
    """Whether the model is needed to name the parameters: they are in flat parameters, or have only indices."""
    return bool(flat_sizes(contents)) or any(True for _ in _numbered_optimizers(contents))


def unflatten(contents: Contents, layout: FlatLayout) -> Contents:
    """Split flat parameters and their optimizer state into tensors with the names and shapes of the parameters.

    An optimizer whose indices cannot be resolved is unchanged; `details["unnamed"]` then has the error.
    """
    tensors: dict[str, StoredTensor] = {}
    values, details = dict(contents.values), dict(contents.details)
    structure = {name: path for name, path in contents.structure.items() if name in contents.values}
    taken: set[str] = set()

    def add(path: KeyPath, tensor: StoredTensor) -> None:
        name = ".".join(map(str, path))
        tensors[name], structure[name] = replace(tensor, name=name), path

    for optimizer in _numbered_optimizers(contents):
        try:
            owners = _owners(contents, optimizer, layout)
        except CheckpointError as error:
            details["unnamed"] = error
            continue
        for number, owner in owners.items():
            for key, tensor in optimizer.states.get(number, ()):
                if not _fits(owner, tensor, contents.world_size or 1):
                    why = f"{tensor.name} has the shape {tensor.shape}, which is not that of {owner.name!r}"
                    raise _wrong(contents, why)
                taken.add(tensor.name)
                for entry in owner.entries:
                    is_own = not tensor.shape or tensor.shape == entry.shape
                    own = tensor if is_own else _cut(tensor, entry.start, entry.shape)
                    add((*optimizer.root, "state", entry.name, key), own)
        for name, group in optimizer.groups.items():
            values[name] = [entry.name for number in group for entry in owners[number].entries]
    for name, tensor in contents.tensors.items():
        if (module := _flat_module(contents, name)) is None:
            continue
        unit, numel = layout.units.get(module), math.prod(tensor.shape)
        if unit is None or unit.numel != numel:
            expected = "none" if unit is None else f"one of {unit.numel:,}"
            raise _wrong(contents, f"{name} has {numel:,} elements, and by the layout there is {expected}")
        taken.add(name)
        for entry in unit.entries:
            for own in (entry.name, *(name for name, stored in layout.ties.items() if stored == entry.name)):
                root = contents.path_of(name)[:-1]
                add((*root, own), _cut(tensor, entry.start, entry.shape))
    for name, tensor in contents.tensors.items():
        # With `use_orig_params=True` a rank's slice of a parameter is stored under the parameter's own name.
        if name not in taken and name not in tensors:
            tensors[name] = tensor
            if name in contents.structure:
                structure[name] = contents.structure[name]
    return replace(contents, tensors=tensors, values=values, structure=structure, details=details)


def _cut(flat: StoredTensor, start: int, shape: tuple[int, ...]) -> StoredTensor:
    """Return the tensor of this shape that starts at element `start` of a flat tensor."""
    size, end = ITEM_BYTES[flat.dtype], start + math.prod(shape)
    chunks: list[StoredChunk] = []
    for chunk in flat.chunks:
        chunk_start = chunk.spec.starts[0] if chunk.spec.starts else 0
        low, high = max(start, chunk_start), min(end, chunk_start + chunk.spec.numel)
        for spec, before in checkpoint_contents.chunks_of_range(shape, low - start, high - start) if low < high else ():
            skip = (low - chunk_start + before) * size
            if chunk.data is not None:
                chunks.append(StoredChunk(spec, data=chunk.data[skip : skip + spec.numel * size]))
            else:
                chunks.append(StoredChunk(spec, chunk.file, chunk.offset + skip))
    return StoredTensor(flat.name, flat.dtype, shape, tuple(chunks))


def _numbered_optimizers(contents: Contents) -> Iterator[_Optimizer]:
    """Yield optimizers whose parameter groups list indices instead of names."""
    groups: dict[KeyPath, dict[str, list[int]]] = {}
    for name, value in contents.values.items():
        path = contents.path_of(name)
        is_list = len(path) >= 3 and path[-3] == "param_groups" and path[-1] == "params" and isinstance(value, list)
        if is_list and value and all(type(number) is int for number in value):
            groups.setdefault(path[:-3], {})[name] = value
    states: dict[KeyPath, dict[int, list[tuple[str, StoredTensor]]]] = {root: {} for root in groups}
    for name, tensor in contents.tensors.items():
        path = contents.path_of(name)
        if len(path) >= 3 and path[-3] == "state" and path[:-3] in groups and str(path[-2]).isdecimal():
            states[path[:-3]].setdefault(int(path[-2]), []).append((str(path[-1]), tensor))
    for root, lists in groups.items():
        yield _Optimizer(root, lists, states[root])


def _owners(contents: Contents, optimizer: _Optimizer, layout: FlatLayout) -> dict[int, FlatUnit]:
    """Return the parameter or flat parameter of each index."""
    numbers = [number for group in optimizer.groups.values() for number in group]
    plain = {
        name: FlatUnit(name, (FlatEntry(name, shape, 0),), math.prod(shape), is_flat=False)
        for name, shape in layout.shapes.items()
    }
    recorded = _recorded_names(contents, optimizer) or layout.optimizer
    if recorded is not None:
        if len(recorded) != len(numbers):
            raise _wrong(contents, f"the optimizer has {len(numbers)} parameters, {len(recorded)} were recorded")
        found = {}
        for number, name in zip(numbers, recorded, strict=True):
            clean = canonical_name(name)  # "module." is DistributedDataParallel's prefix
            owner = layout.units.get(name) or plain.get(clean) or plain.get(clean.removeprefix("module."))
            if owner is None:
                raise _wrong(contents, f"{name!r} is not a parameter of the model")
            found[number] = owner
        return found
    if len(optimizer.groups) > 1:
        raise CheckpointError(
            f"the optimizer has {len(optimizer.groups)} parameter groups, and its state has only indices",
            where=str(contents.path),
            why="the index of a parameter depends on the parameter groups, which are not in the files",
            fix=f"record the order where the model is: write describe_flat_params(model, optimizer) to {LAYOUT_FILE}",
        )
    for owners in (list(layout.units.values()), list(plain.values())):
        found = dict(zip(numbers, owners, strict=False))
        if len(owners) == len(numbers) and all(
            _fits(owner, tensor, contents.world_size or 1)
            for number, owner in found.items()
            for _, tensor in optimizer.states.get(number, ())
        ):
            return found
    raise _wrong(
        contents,
        f"the optimizer has {len(numbers)} parameters; the model has {len(plain)}, in {len(layout.units)} flat ones, "
        "and neither these nor those have the sizes of its state",
    )


def _recorded_names(contents: Contents, optimizer: _Optimizer) -> tuple[str, ...] | None:
    """Return the names that optimizers made from `named_parameters()` store in addition to the indices."""
    names: list[str] = []
    for group in optimizer.groups:
        recorded = contents.values.get(group.removesuffix("params") + "param_names")
        if not isinstance(recorded, list) or not all(isinstance(name, str) for name in recorded):
            return None
        names += recorded
    return tuple(names)


def _fits(owner: FlatUnit, tensor: StoredTensor, world_size: int) -> bool:
    """Whether a tensor can be state of a parameter: a scalar, of its shape, or flat (several copies with HSDP)."""
    if not tensor.shape or (not owner.is_flat and tensor.shape == owner.entries[0].shape):
        return True
    for replicas in range(1, world_size + 1):
        padding = -owner.numel % (world_size // replicas) if owner.is_flat else 0
        if world_size % replicas == 0 and tensor.shape == (replicas * (owner.numel + padding),):
            return True
    return False


def _wrong(contents: Contents, why: str) -> CheckpointError:
    return CheckpointError(
        "the checkpoint's parameters differ from those of this model",
        where=str(contents.path),
        why=why,
        fix="pass the model as it was when the checkpoint was saved, before FSDP wrapped it",
    )


def record_flat_params(model: nn.Module, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> Path:
    """Write `fsdp1_layout.json` beside a LOCAL checkpoint, so that it can be converted without the model.

    Args:
        model: The model, wrapped in FSDP1's `FullyShardedDataParallel`.
        folder: Folder of the ranks' files.
        optimizer: Optimizer created after wrapping, to record the indices of the parameters in its state.

    Returns:
        Path of the written file.

    Ranks:
        Local: call it on rank 0; all ranks have the same layout.
    """
    path = Path(storage.place(folder)) / LAYOUT_FILE
    path.write_text(json.dumps(describe_flat_params(model, optimizer), indent=1))
    return path


def describe_flat_params(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Return what `record_flat_params` writes: flat parameters, their parameters, and the optimizer's order."""
    from shardwise import compat

    units, ties = [], {}
    names: dict[int, str] = {id(parameter): canonical_name(name) for name, parameter in model.named_parameters()}
    for wrapped, flat_param in compat.fsdp1_flat_params(model):
        module = canonical_name(wrapped)
        names[id(flat_param)] = module
        entries = [
            {"name": _join(module, name), "shape": list(shape), "start": start}
            for name, shape, start in compat.flat_param_entries(flat_param)
        ]
        ties |= {_join(module, also): _join(module, stored) for also, stored in compat.flat_param_ties(flat_param)}
        units.append({"module": module, "numel": compat.flat_param_numel(flat_param), "params": entries})
    if not units:
        raise CheckpointError(
            "the model has no flat parameters",
            why="only modules wrapped by FSDP1's FullyShardedDataParallel have them",
            fix="pass the wrapped model",
        )
    params = [{"name": entry["name"], "shape": entry["shape"]} for unit in units for entry in unit["params"]]
    layout: dict[str, Any] = {"units": units, "params": params, "ties": ties}
    if optimizer is not None:
        layout["optimizer"] = [names[id(each)] for group in optimizer.param_groups for each in group["params"]]
    return layout


def _join(module: str, name: str) -> str:
    return canonical_name(f"{module}.{name}" if module else name)
