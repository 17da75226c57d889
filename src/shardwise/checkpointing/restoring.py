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
from shardwise.checkpointing.contents import ChunkSpec, Contents, KeyPath, StoredTensor
from shardwise.checkpointing.reading import Request
from shardwise.checkpointing.sharing import PER_RANK
from shardwise.checkpointing.state import optimizer_state
from shardwise.checkpointing.state.names import canonical_name
from shardwise.checkpointing.state.nested import LAYOUT, dotted, flatten, put_together, unflatten
from shardwise.checkpointing.state.optimizer_state import KINDS, LIVE_OPTIONS, Kind, NamedGroup, default_kind, kind_of
from shardwise.checkpointing.state.slices import local_chunks
from shardwise.checkpointing.verifying import USE_THE_MODEL, mixed_order, unsure_order
from shardwise.errors import CheckpointError
from shardwise.planning.settings import dtype_name
from shardwise.sharding.inventory import local_tensor
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
    """Optimizers whose stored state is not whole, and why: see `verifying.mixed_order`."""

    def path(self, name: str) -> KeyPath:
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
    common: list[dict[str, Any]] = []
    own: dict[str, str] = {}  # what this rank has of its own, to the name under which it is stored
    differing = set()
    for stored in (contents.tensors, contents.values):
        common.append({name: item for name, item in stored.items() if not name.startswith(f"{PER_RANK}.")})
        for name in stored:
            if name in common[-1]:
                continue
            _, owner, bare = name.split(".", 2)
            if _is_reordered(contents, name, bare):
                continue  # before 0.2.0 names of a group were stored in each rank's own order
            if contents.world_size != size:
                differing.add(bare)
            elif owner == str(rank):
                own[bare] = name
    tensors, values = common
    structure = dict(contents.structure)
    for bare, name in own.items():
        structure.setdefault(bare, tuple(contents.structure.get(name, ())[2:]) or (bare,))
        tensors.pop(bare, None)
        values.pop(bare, None)
        if name in contents.tensors:
            tensors[bare] = dataclasses.replace(contents.tensors[name], name=bare)
        else:
            values[bare] = contents.values[name]
    view = dataclasses.replace(contents, tensors=tensors, values=values, structure=structure)
    return RankView(view, frozenset(differing), mixed_order(contents))


def _is_reordered(contents: Contents, name: str, bare: str) -> bool:
    lists = [contents.values.get(each) for each in (name, bare)]
    if not bare.endswith(".params") or not all(isinstance(each, (list, tuple)) for each in lists):
        return False
    return sorted(map(str, lists[0])) == sorted(map(str, lists[1]))  # pyrefly: ignore[bad-argument-type]


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
            self.requests += [Request(name, memory, spec) for spec, memory in local_chunks(tensor)]
        else:
            self.requests.append(Request(name, tensor.detach(), ChunkSpec.whole(tuple(tensor.shape))))


def plan_object(
    restoring: Restoring,
    view: RankView,
    key: str,
    live: Any,
    put: Callable[[Any], object],
    *,
    path: KeyPath | None = None,
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
    path = path or (key,)
    tensors, values = view.contents.tensors, view.contents.values
    layout = values.get(f"{key}.{LAYOUT}")
    names = [key] if key in tensors or key in values else []
    names += [name for name in view.names_under(f"{key}.") if not name.endswith(f".{LAYOUT}")]
    if layout is None and not names:
        restoring.problems.append(f"{key}: not in the checkpoint")
        return
    if differing := view.differing_under(f"{key}."):
        restoring.problems.append(
            f"{key}: its state differed between the {view.contents.world_size} ranks that saved it ({differing[0]}); "
            "leave it out of load() to go on without it"
        )
        return
    try:
        current = flatten(live, path)[0].tensors
    except CheckpointError:  # what is there now could not be stored; that is no reason not to load
        current = {}
    targets: dict[str, torch.Tensor] = {}
    for name in names:
        if name in tensors:
            target = current.get(name)
            takes = target is not None and _takes(target, tensors[name])
            targets[name] = target if target is not None and takes else new_tensor(tensors[name])
            restoring.read_into(name, targets[name])

    def find(name: str, is_tensor: bool) -> Any:
        return targets[name] if is_tensor else values[name]

    def finish() -> None:
        if layout is not None:
            put(unflatten(layout, find))
        else:
            put(put_together({view.path(name)[len(path) :]: find(name, name in targets) for name in names}))

    restoring.finish.append(finish)


def new_tensor(stored: StoredTensor) -> torch.Tensor:
    """CPU memory for all of a stored tensor."""
    return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="cpu")


def _takes(tensor: torch.Tensor, stored: StoredTensor) -> bool:
    """Whether a stored tensor can be read into this one."""
    if tuple(tensor.shape) != stored.shape or tensor.is_meta:
        return False
    return isinstance(tensor, DTensor) or dtype_name(tensor.dtype) == stored.dtype


@dataclass(slots=True)
class _StoredGroup:
    """A parameter group in a checkpoint."""

    options: dict[KeyPath, str]
    """The keys in the group, and the flat name."""
    names: list[str]
    """Of its parameters."""


def plan_optimizer(
    restoring: Restoring, view: RankView, optimizer: Optimizer, groups: list[NamedGroup], path: KeyPath, *, strict: bool
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
    prefix, problems = dotted(path), restoring.problems
    states, stored_groups = _read_index(view, path)
    if prefix in view.mixed:
        problems.append(f"{prefix} (SW337): {view.mixed[prefix]}; {USE_THE_MODEL}")
        return
    if prefix in (unsure := unsure_order(view.contents)):
        warnings.warn(f"{prefix} (SW338): {unsure[prefix]}. If that was so, {USE_THE_MODEL}", stacklevel=2)
    if not stored_groups and not states:
        problems.append(f"{prefix}: the checkpoint has no state of this optimizer")
        return
    if strict and (differing := view.differing_under(f"{prefix}.")):
        problems.append(
            f"{prefix}: {len(differing)} states differed between the {view.contents.world_size} ranks that saved them, "
            f"as {differing[0]}"
        )
    live = {name for group in groups for name in group.names}
    known = {name for group in stored_groups for name in group.names} | set(states)
    if strict:
        problems += [f"{prefix}: {name} has no place in the stored groups" for name in sorted(live - known)]
        problems += [f"{prefix}: {name} was optimized, and is not now" for name in sorted(known - live)]
    kinds: Mapping[str, Kind] = view.contents.values.get(f"{prefix}.{KINDS}", {})
    for place, group in enumerate(groups):
        stored = _find_group(group, place, stored_groups)
        options: dict[str, Any] = {}
        if stored is not None and not (strict and set(stored.names) != set(group.names)):
            options = _plan_options(restoring, view, group, stored, prefix)
        else:
            what = f"the group with {group.names[0]}" if group.names else f"the empty group {place}"
            if strict:
                problems.append(f"{prefix}: no stored group has the same parameters as {what}")
            else:
                restoring.notes.append(f"{prefix}: {what} keeps its options, no stored group has its parameters")
        options |= {key: group.options[key] for key in LIVE_OPTIONS - {"params"} if key in group.options}
        for name, parameter in zip(group.names, group.parameters, strict=True):
            found = {keys: (kinds.get(f"{name}.{dotted(keys)}"), full) for keys, full in states.get(name, {}).items()}
            _plan_state(restoring, view, optimizer, parameter, found, options)


def _plan_state(
    restoring: Restoring,
    view: RankView,
    optimizer: Optimizer,
    parameter: torch.Tensor,
    stored: Mapping[KeyPath, tuple[Kind | None, str]],
    options: Mapping[str, Any],
) -> None:
    """Plan to restore one parameter's state.

    Args:
        restoring: Is added to.
        view: The checkpoint.
        optimizer: Keeps the state.
        parameter: Whose state it is.
        stored: By the keys in the state: its layout, where the checkpoint says it, and the flat name.
        options: Of the parameter's group.
    """
    parts: dict[KeyPath, Any] = {}
    kinds: dict[KeyPath, Kind] = {}
    for keys, (known_kind, name) in stored.items():
        tensor = view.contents.tensors.get(name)
        if tensor is None:
            parts[keys] = view.contents.values[name]
            continue
        key = dotted(keys)
        kinds[keys] = kind = known_kind or default_kind(key, tensor.shape, parameter)
        target = _live_state(optimizer, parameter, keys, kind, tensor)
        if target is None:
            target = optimizer_state.make_state(
                kind, key, getattr(torch, tensor.dtype), tensor.shape, parameter, options
            )
        restoring.read_into(name, target)
        parts[keys] = target

    def finish() -> None:
        if not parts:  # it had none when it was saved
            optimizer.state.pop(parameter, None)
            return
        optimizer.state[parameter] = put_together({
            keys: local_tensor(part) if kinds.get(keys) == "local" else part for keys, part in parts.items()
        })  # fmt: skip

    restoring.finish.append(finish)


def _live_state(
    optimizer: Optimizer, parameter: torch.Tensor, keys: KeyPath, kind: Kind, stored: StoredTensor
) -> torch.Tensor | None:
    """The optimizer's own tensor, where it is just what the stored one needs."""
    tensor = (optimizer.state.get(parameter) or {}).get(keys[0]) if len(keys) == 1 else None
    if not isinstance(tensor, torch.Tensor) or dtype_name(tensor.dtype) != stored.dtype:
        return None
    if kind_of(str(keys[0]), tensor, parameter) != kind:
        return None
    if kind == "local" and isinstance(parameter, DTensor):
        return compat.dtensor_like(tensor, parameter)
    return tensor if tuple(tensor.shape) == stored.shape else None


def _plan_options(
    restoring: Restoring, view: RankView, group: NamedGroup, stored: _StoredGroup, prefix: str
) -> dict[str, Any]:
    """Plan to set a group's options; return what they will be."""
    values: dict[KeyPath, Any] = {}
    for keys, name in stored.options.items():
        tensor = view.contents.tensors.get(name)
        values[keys] = view.contents.values[name] if tensor is None else new_tensor(tensor)
        if tensor is not None:
            restoring.read_into(name, values[keys])
    options = put_together(values) if values else {}
    options = {key: value for key, value in options.items() if key not in LIVE_OPTIONS}

    def finish() -> None:
        for key, value in options.items():
            current = group.options.get(key)
            if isinstance(current, torch.Tensor):  # a learning rate that a captured graph reads
                current.copy_(torch.as_tensor(value))
            elif isinstance(value, torch.Tensor) and key in group.options and value.ndim == 0:
                group.options[key] = value.item()
            else:
                group.options[key] = value

    restoring.finish.append(finish)
    return options


def _find_group(group: NamedGroup, place: int, stored: list[_StoredGroup]) -> _StoredGroup | None:
    """The stored group with this group's parameters, or most of them; groups may have changed places."""
    wanted = set(group.names)
    same = [each for each in stored if set(each.names) == wanted]
    if same:  # several only when they are empty
        return stored[place] if place < len(stored) and stored[place] in same else same[0]
    best = max(stored, key=lambda each: len(wanted.intersection(each.names)), default=None)
    return best if best is not None and wanted.intersection(best.names) else None


def _read_index(view: RankView, path: KeyPath) -> tuple[dict[str, dict[KeyPath, str]], list[_StoredGroup]]:
    """What is stored of an optimizer: by parameter, the keys in its state and the flat name; and the groups."""
    states: dict[str, dict[KeyPath, str]] = {}
    groups: dict[int, dict[KeyPath, str]] = {}
    for name in view.names_under(dotted(path) + "."):
        keys = view.path(name)[len(path) :]
        if len(keys) >= 3 and keys[0] == "state":
            states.setdefault(canonical_name(str(keys[1])), {})[keys[2:]] = name
        elif len(keys) >= 3 and keys[0] == "param_groups" and str(keys[1]).isdecimal():
            groups.setdefault(int(keys[1]), {})[keys[2:]] = name
    values = view.contents.values
    return states, [
        _StoredGroup(options, [canonical_name(str(name)) for name in values.get(options.get(("params",), ""), [])])
        for _, options in sorted(groups.items())
    ]
