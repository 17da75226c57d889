"""What one rank needs of a checkpoint: views by rank, and how models, optimizers and values take it up."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise import compat
from shardwise.checkpointing.contents import Box, Contents, StoredTensor
from shardwise.checkpointing.reading import Request
from shardwise.checkpointing.sharing import PER_RANK
from shardwise.checkpointing.state.names import canonical_name
from shardwise.checkpointing.state.nested import LAYOUT, Flat, Path, flatten, put_together, unflatten
from shardwise.checkpointing.state.optimizer_state import (
    KINDS,
    LIVE_OPTIONS,
    Kind,
    NamedGroup,
    default_kind,
    kind_of,
    make_state,
    without_layout,
)
from shardwise.checkpointing.state.slices import parts_of
from shardwise.checkpointing.verifying import USE_THE_MODEL, mixed_order, unsure_order
from shardwise.errors import CheckpointError
from shardwise.sharding.repointing import follow_names


@dataclass(frozen=True, slots=True)
class RankView:
    """What a rank finds in a checkpoint."""

    contents: Contents
    """Without the names of single ranks."""
    differing: frozenset[str]
    """Names that had different values on the ranks that saved, where this run has another number of ranks: only
    rank 0's are here."""
    mixed: Mapping[str, str] = field(default_factory=dict)
    """Optimizers whose stored state is not whole, and why: see `soundness.mixed_order`."""

    def path(self, name: str) -> Path:
        """The keys that lead to a name in the nested state dict."""
        return self.contents.structure.get(name) or tuple(name.split("."))

    def names_under(self, prefix: str) -> list[str]:
        """Tensors and values whose names begin so, in the checkpoint's order."""
        contents = self.contents
        return [name for names in (contents.tensors, contents.values) for name in names if name.startswith(prefix)]

    def differing_under(self, prefix: str) -> list[str]:
        """Of `differing`, those whose names begin so."""
        return sorted(name for name in self.differing if name.startswith(prefix))


def view_for(contents: Contents, rank: int, size: int) -> RankView:
    """The checkpoint as rank `rank` of `size` sees it."""
    tensors = {name: tensor for name, tensor in contents.tensors.items() if not name.startswith(f"{PER_RANK}.")}
    values = {name: value for name, value in contents.values.items() if not name.startswith(f"{PER_RANK}.")}
    structure = dict(contents.structure)
    differing = set()
    for stored in (contents.tensors, contents.values):
        for name in stored:
            if not name.startswith(f"{PER_RANK}."):
                continue
            _, owner, bare = name.split(".", 2)
            if _is_reordered(contents, name, bare):
                continue  # before 0.2.0 names of a group were stored in each rank's own order
            if contents.world_size != size:
                differing.add(bare)
            elif owner == str(rank):
                structure.setdefault(bare, tuple(contents.structure.get(name, ())[2:]) or (bare,))
                if name in contents.tensors:
                    tensors[bare] = dataclasses.replace(contents.tensors[name], name=bare)
                    values.pop(bare, None)
                else:
                    values[bare] = contents.values[name]
                    tensors.pop(bare, None)
    view = dataclasses.replace(contents, tensors=tensors, values=values, structure=structure)
    return RankView(view, frozenset(differing), mixed_order(contents))


def _is_reordered(contents: Contents, name: str, bare: str) -> bool:
    if not bare.endswith(".params") or name not in contents.values or bare not in contents.values:
        return False
    lists = (contents.values[name], contents.values[bare])
    return all(isinstance(names, (list, tuple)) for names in lists) and sorted(map(str, lists[0])) == sorted(
        map(str, lists[1])
    )


@dataclass(slots=True)
class Restoring:
    """A load in the making."""

    requests: list[Request] = field(default_factory=list)
    finish: list[Callable[[], None]] = field(default_factory=list)
    """To be called in order, once everything is read."""
    problems: list[str] = field(default_factory=list)
    """Why it cannot be loaded, a line each."""
    notes: list[str] = field(default_factory=list)
    """What the user should know."""

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Ask for this rank's part of a tensor."""
        if isinstance(tensor, DTensor):
            self.requests += [Request(name, part.memory, part.box) for part in parts_of(tensor)]
        else:
            self.requests.append(Request(name, tensor.detach(), Box.whole(tuple(tensor.shape))))


def plan_object(
    restoring: Restoring, view: RankView, key: str, live: Any, put: Callable[[Any], object], *, path: Path | None = None
) -> None:
    """Plan to restore one object from what is stored under `key`.

    Args:
        restoring: Is added to.
        view: The checkpoint.
        key: The flat name under which it stands.
        live: Its state now: tensors in it are read into where they have the stored shape, as DCP does; that is
            how sharded ones keep their layout.
        put: Takes the restored state.
        path: The keys that lead to it, where a key has a dot.
    """
    names = [name for name in view.names_under(f"{key}.") if not name.endswith(f".{LAYOUT}")]
    layout = view.contents.values.get(f"{key}.{LAYOUT}")
    names = [*([key] if key in view.contents.tensors or key in view.contents.values else []), *names]
    if layout is None and not names:
        restoring.problems.append(f"{key}: not in the checkpoint")
        return
    if differing := view.differing_under(f"{key}."):
        restoring.problems.append(
            f"{key}: its state differed between the {view.contents.world_size} ranks that saved it ({differing[0]}); "
            "leave it out of load() to go on without it"
        )
        return
    targets = _targets(view, names, live, path or (key,))
    for name, target in targets.items():
        restoring.read_into(name, target)

    def find(name: str, is_tensor: bool) -> Any:
        return targets[name] if is_tensor else view.contents.values[name]

    def finish() -> None:
        if layout is not None:
            put(unflatten(layout, find))
            return
        depth = len(path or (key,))
        put(put_together({view.path(name)[depth:]: find(name, name in targets) for name in names}))

    restoring.finish.append(finish)


def new_tensor(stored: StoredTensor) -> torch.Tensor:
    """CPU memory for all of a stored tensor."""
    return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="cpu")


def _targets(view: RankView, names: list[str], live: Any, path: Path) -> dict[str, torch.Tensor]:
    try:
        flat = flatten(live, path)[0]
    except CheckpointError:  # what is there now could not be stored; that is no reason not to load
        flat = Flat()
    targets = {}
    for name in names:
        stored = view.contents.tensors.get(name)
        if stored is None:
            continue
        tensor = flat.tensors.get(name)
        targets[name] = tensor if tensor is not None and _takes(tensor, stored) else new_tensor(stored)
    return targets


def _takes(tensor: torch.Tensor, stored: StoredTensor) -> bool:
    """Whether a stored tensor can be read into this one."""
    if tuple(tensor.shape) != stored.shape or tensor.is_meta:
        return False
    return isinstance(tensor, DTensor) or str(tensor.dtype) == f"torch.{stored.dtype}"


@dataclass(slots=True)
class _Stored:
    """What a checkpoint says about one optimizer."""

    states: dict[str, dict[Path, str]] = field(default_factory=dict)
    """By parameter: the keys below it, and the flat name."""
    groups: list[dict[Path, str]] = field(default_factory=list)
    params: list[list[str]] = field(default_factory=list)
    """Of each group."""
    kinds: Mapping[str, Kind] = field(default_factory=dict)


def plan_optimizer(
    restoring: Restoring, view: RankView, optimizer: Optimizer, groups: list[NamedGroup], path: Path, *, strict: bool
) -> None:
    """Plan to restore one optimizer.

    Args:
        restoring: Is added to.
        view: The checkpoint.
        optimizer: Stepped or not; it is never stepped here.
        groups: Its groups by name.
        path: Where its state stands.
        strict: Every parameter must be in the same group as it was.
    """
    follow_names(optimizer)
    prefix = ".".join(map(str, path))
    stored = _read_index(view, path)
    if prefix in view.mixed:
        restoring.problems.append(f"{prefix} (SW337): {view.mixed[prefix]}; {USE_THE_MODEL}")
        return
    if prefix in (unsure := unsure_order(view.contents)):
        warnings.warn(f"{prefix} (SW338): {unsure[prefix]}. If that was so, {USE_THE_MODEL}", stacklevel=2)
    if not stored.groups and not stored.states:
        restoring.problems.append(f"{prefix}: the checkpoint has no state of this optimizer")
        return
    if strict and (differing := view.differing_under(f"{prefix}.")):
        restoring.problems.append(
            f"{prefix}: {len(differing)} states differed between the {view.contents.world_size} ranks that saved them, "
            f"as {differing[0]}"
        )
    live = {name for group in groups for name in group.names}
    known = {name for names in stored.params for name in names} | set(stored.states)
    if strict:
        restoring.problems += [f"{prefix}: {name} has no place in the stored groups" for name in sorted(live - known)]
        restoring.problems += [f"{prefix}: {name} was optimized, and is not now" for name in sorted(known - live)]
    for index, group in enumerate(groups):
        options = _plan_options(restoring, view, group, index, stored, prefix, strict=strict)
        for name, parameter in zip(group.names, group.parameters, strict=True):
            _plan_state(restoring, view, optimizer, parameter, stored, name, {**options, **_live_options(group)})


def _plan_state(
    restoring: Restoring,
    view: RankView,
    optimizer: Optimizer,
    parameter: torch.Tensor,
    stored: _Stored,
    name: str,
    options: Mapping[str, Any],
) -> None:
    parts: dict[Path, Any] = {}
    kinds: dict[Path, Kind] = {}
    for keys, full_name in stored.states.get(name, {}).items():
        tensor = view.contents.tensors.get(full_name)
        if tensor is None:
            parts[keys] = view.contents.values[full_name]
            continue
        key = ".".join(map(str, keys))
        kind = stored.kinds.get(f"{name}.{key}", default_kind(key, tensor.shape, parameter))
        dtype = getattr(torch, tensor.dtype)
        target = _live_state(optimizer, parameter, keys, kind, dtype, tensor.shape)
        if target is None:
            target = make_state(kind, key, dtype, tensor.shape, parameter, options)
        restoring.read_into(full_name, target)
        parts[keys], kinds[keys] = target, kind

    def finish() -> None:
        if not parts:  # it had none when it was saved
            optimizer.state.pop(parameter, None)
            return
        settled = {keys: without_layout(kinds[keys], part) if keys in kinds else part for keys, part in parts.items()}
        optimizer.state[parameter] = put_together(settled)

    restoring.finish.append(finish)


def _live_state(
    optimizer: Optimizer, parameter: torch.Tensor, keys: Path, kind: Kind, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor | None:
    """The optimizer's own tensor, where it is just what the stored one needs."""
    state = optimizer.state.get(parameter) or {}
    tensor = state.get(keys[0]) if len(keys) == 1 else None
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype:
        return None
    key = str(keys[0])
    if kind_of(key, tensor, parameter) != kind:
        return None
    if kind == "local" and isinstance(parameter, DTensor):
        return compat.dtensor_like(tensor, parameter)
    return tensor if tuple(tensor.shape) == shape else None


def _plan_options(
    restoring: Restoring, view: RankView, group: NamedGroup, place: int, stored: _Stored, prefix: str, *, strict: bool
) -> dict[str, Any]:
    """Plan to set a group's options; return what they will be."""
    index = _find_group(group, place, stored)
    if index is None or (strict and set(stored.params[index]) != set(group.names)):
        what = f"the group with {group.names[0]}" if group.names else f"the empty group {place}"
        if strict:
            restoring.problems.append(f"{prefix}: no stored group has the same parameters as {what}")
        else:
            restoring.notes.append(f"{prefix}: {what} keeps its options, no stored group has its parameters")
        return {}
    values: dict[Path, Any] = {}
    for keys, name in stored.groups[index].items():
        tensor = view.contents.tensors.get(name)
        values[keys] = view.contents.values[name] if tensor is None else new_tensor(tensor)
        if tensor is not None:
            restoring.read_into(name, values[keys])
    options = put_together(values) if values else {}
    options = {key: value for key, value in options.items() if key not in LIVE_OPTIONS}

    def finish() -> None:
        for key, value in options.items():
            _set_option(group.options, key, value)
        wrong = [key for key, value in options.items() if not _is_equal(group.options[key], value)]
        if wrong:
            raise CheckpointError(
                f"the optimizer's {', '.join(wrong)} did not take the stored value",
                where=f"{prefix}.param_groups.{index}",
                why="options of a group are compared after loading",
                fix="let no hook of the optimizer change them while it is loaded",
            )

    restoring.finish.append(finish)
    return options


def _live_options(group: NamedGroup) -> dict[str, Any]:
    return {key: group.options[key] for key in LIVE_OPTIONS if key != "params" and key in group.options}


def _set_option(options: dict[str, Any], key: str, value: Any) -> None:
    current = options.get(key)
    if isinstance(current, torch.Tensor):  # a learning rate that a captured graph reads
        current.copy_(torch.as_tensor(value))
    elif isinstance(value, torch.Tensor) and key in options:
        options[key] = value.item() if value.ndim == 0 else value
    else:
        options[key] = value


def _is_equal(current: Any, value: Any) -> bool:
    if isinstance(current, torch.Tensor) or isinstance(value, torch.Tensor):
        current, value = torch.as_tensor(current).cpu(), torch.as_tensor(value).cpu()
        return torch.equal(current.to(value.dtype), value)
    return repr(current) == repr(value)  # NaN equals itself here


def _find_group(group: NamedGroup, index: int, stored: _Stored) -> int | None:
    """The stored group with this group's parameters, or most of them; groups may have changed places."""
    wanted = set(group.names)
    same = [each for each, names in enumerate(stored.params) if set(names) == wanted]
    if same:  # several only when they are empty
        return index if index in same else same[0]
    shared = [len(set(names) & wanted) for names in stored.params]
    best = max(range(len(shared)), key=lambda each: shared[each], default=None)
    return best if best is not None and shared[best] else None


def _read_index(view: RankView, path: Path) -> _Stored:
    stored = _Stored()
    prefix = ".".join(map(str, path)) + "."
    by_group: dict[int, dict[Path, str]] = {}
    stored.kinds = view.contents.values.get(prefix + KINDS, {})
    for name in view.names_under(prefix):
        keys = view.path(name)[len(path) :]
        if len(keys) >= 3 and keys[0] == "state":
            stored.states.setdefault(canonical_name(str(keys[1])), {})[keys[2:]] = name
        elif len(keys) >= 3 and keys[0] == "param_groups" and str(keys[1]).isdecimal():
            by_group.setdefault(int(keys[1]), {})[keys[2:]] = name
    for index in sorted(by_group):
        names = view.contents.values.get(by_group[index].get(("params",), ""), [])
        stored.groups.append(by_group[index])
        stored.params.append([canonical_name(str(name)) for name in names])
    return stored
