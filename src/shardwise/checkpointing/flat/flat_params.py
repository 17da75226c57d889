"""FSDP1's flat parameters: which parameters one holds, in which order, and with which padding between them.

FSDP1 lays the parameters of each wrapped module end to end in one flat parameter. The names of the flat parameters
say which modules were wrapped; the model's definition says which parameters those have. No torch here: a model is
only asked for names and shapes.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.checkpointing.contents import Box, Contents
from shardwise.checkpointing.state.keys import canonical_name
from shardwise.checkpointing.storage import files
from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

FLAT_PARAM = "_flat_param"
LAYOUT_FILE = "fsdp1_layout.json"
_MAX_LAYOUT_BYTES = 64 << 20
_ALIGNMENTS = (0, 4, 8, 2, 16, 1)
"""Elements a parameter's start is a multiple of: none with `use_orig_params=False`, else 16 bytes of the dtype."""


@dataclass(frozen=True, slots=True)
class FlatEntry:
    """One parameter in a flat parameter."""

    name: str
    shape: tuple[int, ...]
    start: int
    """Its first element."""

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FlatUnit:
    """One flat parameter: what a wrapped module's parameters became."""

    module: str
    """The wrapped module's name; empty for the root."""
    entries: tuple[FlatEntry, ...]
    numel: int
    """With the padding between and after the parameters, without that of the last rank."""


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """All flat parameters of a model."""

    units: Mapping[str, FlatUnit]
    """By name of the wrapped module, in the order in which `parameters()` gives the flat parameters."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of all parameters, in the order in which `parameters()` of the unwrapped model gives them."""
    ties: Mapping[str, str]
    """Further names of parameters, each with the name under which it is stored."""
    optimizer: tuple[str, ...] | None = None
    """Parameters, or wrapped modules, in the order in which the optimizer numbers them, where that was recorded."""


def layout_of_model(model: nn.Module, contents: Contents) -> FlatLayout:
    """Find out the layout of a LOCAL checkpoint from the model it was saved from.

    Args:
        model: Built as it was before FSDP1 wrapped it; on the meta device is enough.
        contents: As `read_rank_files` gives it.

    Raises:
        CheckpointError: The flat parameters are not those of this model.

    Ranks:
        Local.
    """
    stored = flat_sizes(contents)
    modules = {canonical_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
    if unknown := [name for name in stored if name not in modules]:
        raise _does_not_fit(contents, f"it has no module called {unknown[0]!r}, of which there is a flat parameter")
    owners: dict[int, str] = {}
    members: dict[str, list[tuple[str, Any]]] = {}
    ties: dict[str, str] = {}
    for unit in sorted(stored, key=lambda name: -len(name.split(".")) if name else 1):  # inner ones were wrapped first
        members[unit] = []
        for name, parameter in _parameters(modules[unit], unit):
            if id(parameter) not in owners:
                owners[id(parameter)] = name
                members[unit].append((name, parameter))
            elif owners[id(parameter)] != name:
                ties.setdefault(name, owners[id(parameter)])
    whole = {name for name, tensor in contents.tensors.items() if len(tensor.pieces) == 1}
    units = {}
    for name in (name for name in modules if name in stored):  # modules come in the order of parameters()
        kept = [(param, tuple(tensor.shape)) for param, tensor in members[name]]
        units[name] = _fit(name, kept, stored[name], contents, whole)
    shapes = {canonical_name(name): tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return FlatLayout(units, shapes, ties)


def read_layout(folder: files.Place) -> FlatLayout | None:
    """The layout that `describe_flat_params` recorded beside the checkpoint, if it is there.

    Raises:
        CheckpointError: It is damaged.

    Ranks:
        Local.
    """
    place = files.join(folder, LAYOUT_FILE)
    if files.size_of(place) is None:
        return None
    try:
        recorded = json.loads(files.read_small(place, _MAX_LAYOUT_BYTES))
        units = {unit["module"]: _recorded_unit(unit) for unit in recorded["units"]}
        optimizer = recorded.get("optimizer")
        shapes = {str(entry["name"]): _shape(entry["shape"]) for entry in recorded["params"]}
        ties = {str(name): str(stored) for name, stored in recorded.get("ties", {}).items()}
        return FlatLayout(units, shapes, ties, None if optimizer is None else tuple(map(str, optimizer)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{LAYOUT_FILE} cannot be read", where=str(place), why=str(error), fix="record it again, or pass the model"
        ) from None


def flat_sizes(contents: Contents) -> dict[str, int]:
    """Wrapped module to the elements of its flat parameter."""
    found: dict[str, int] = {}
    for name, tensor in contents.tensors.items():
        path = contents.structure.get(name, (name,))
        module, _, last = canonical_name(str(path[-1])).rpartition(".")
        if last == FLAT_PARAM:
            found[module] = math.prod(tensor.shape)
    return found


def boxes_of_range(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[Box, int]]:
    """Cut the elements `[start, end)` of a row-major tensor into boxes whose elements are consecutive.

    Yields:
        Each box and how many of the range's elements come before it. At most two boxes a dimension, less one.
    """
    if start >= end:
        return
    if len(shape) <= 1:
        yield Box((start,) * len(shape), (end - start,) * len(shape)), 0
        return
    row = math.prod(shape[1:])
    first, last = start // row, (end - 1) // row
    done = 0
    if first != last and start % row:
        for box, before in boxes_of_range(shape[1:], start % row, row):
            yield Box((first, *box.starts), (1, *box.sizes)), before
        done, first = row - start % row, first + 1
    full_rows = (end - first * row) // row if start + done == first * row else 0
    if full_rows:
        rest = tuple(shape[1:])
        yield Box((first, *(0 for _ in rest)), (full_rows, *rest)), done
        done, first = done + full_rows * row, first + full_rows
    if start + done < end:
        begin = start + done - first * row
        for box, before in boxes_of_range(shape[1:], begin, end - first * row):
            yield Box((first, *box.starts), (1, *box.sizes)), done + before


def _parameters(module: nn.Module, prefix: str) -> Iterator[tuple[str, Any]]:
    """Every parameter under a module, tied ones under each of their names, in the order FSDP1 flattens them."""
    for path, submodule in module.named_modules(remove_duplicate=False):
        for name, parameter in submodule.named_parameters(recurse=False, remove_duplicate=False):
            yield canonical_name(".".join(part for part in (prefix, path, name) if part)), parameter


def _fit(
    module: str, members: Sequence[tuple[str, tuple[int, ...]]], numel: int, contents: Contents, whole: set[str]
) -> FlatUnit:
    """Lay the parameters end to end in the way that gives the stored number of elements."""
    # Parameters of ignored modules are no part of a flat parameter: the checkpoint holds them as they are.
    flattened = [(name, shape) for name, shape in members if f"model.{name}" not in whole and name not in whole]
    world_size = contents.world_size or 1
    shard_counts = [count for count in range(world_size, 0, -1) if world_size % count == 0]  # fewer: hybrid sharding
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
            why="FSDP1 pads between parameters, and its size does not say how",
            fix=f"record the layout where the model is: record_flat_params(model, folder) writes {LAYOUT_FILE}",
        )
    total = sum(math.prod(shape) for _, shape in members)
    raise _does_not_fit(
        contents,
        f"the flat parameter of {where} has {numel:,} elements, and the model's {len(members)} parameters there "
        f"have {total:,}",
    )


def _starts_agree(unit: FlatUnit, contents: Contents) -> bool:
    """Whether parameters start where the files show them to, where they do."""
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


def _shape(sizes: Any) -> tuple[int, ...]:
    shape = tuple(map(int, sizes))
    if min(shape, default=0) < 0:
        raise ValueError("a parameter with a negative size")
    return shape


def _recorded_unit(unit: Mapping[str, Any]) -> FlatUnit:
    entries = tuple(
        FlatEntry(str(entry["name"]), _shape(entry["shape"]), int(entry["start"])) for entry in unit["params"]
    )
    if any(not 0 <= entry.start <= entry.start + entry.numel <= int(unit["numel"]) for entry in entries):
        raise ValueError("a parameter that does not lie in its flat parameter")
    return FlatUnit(str(unit["module"]), entries, int(unit["numel"]))


def _does_not_fit(contents: Contents, why: str) -> CheckpointError:
    return CheckpointError(
        "the checkpoint's flat parameters are not those of this model",
        where=str(contents.path),
        why=why,
        fix="pass the model as it was when the checkpoint was saved, before FSDP wrapped it",
    )
