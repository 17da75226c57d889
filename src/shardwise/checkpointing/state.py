"""The objects of a run as one flat table of tensors and values; optimizer state is stored by parameter names.

torch's state-dict functions run a step with zero gradients to find the state, skip that step (and return nothing) if
any gradient exists, and return the live tensors. Here the stored state is the optimizer's current state; loading
creates the state that the checkpoint contains.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.optim import Optimizer

from shardwise import compat
from shardwise.checkpointing.contents import KeyPath
from shardwise.checkpointing.formats.values import (
    decode_value,
    encode_value,
    mapping_type,
    typed_mapping,
    unreadable_value,
)
from shardwise.checkpointing.names import ModelTensor, model_tensors, refuse_unregistered
from shardwise.distributed.agreement import gather_objects
from shardwise.errors import CheckpointError, ConfigError
from shardwise.models.random_state import random_state, seed_everything, set_random_state
from shardwise.sharding.inventory import canonical_name, local_tensor
from shardwise.sharding.registry import names_elsewhere, sharded_state
from shardwise.sharding.repointing import COUNTERS, refuse_foreign

LAYOUT = "__layout__"
"""`<object>.__layout__` describes how the names of an object are nested."""
PER_RANK = "per_rank"
"""Prefix of values that differ from rank 0's: `per_rank.<rank>.<name>`."""


@dataclass(slots=True)
class FlatState:
    """This rank's nested state under flat names, as it will be stored."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """The live tensors."""
    values: dict[str, Any] = field(default_factory=dict)
    """Encoded snapshots of the values."""
    paths: dict[str, KeyPath] = field(default_factory=dict)
    """Path of keys by flat name."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Name of the stored tensor by each further name of a tied weight."""
    details: dict[str, Any] = field(default_factory=dict)
    """Other metadata of the run for the manifest; JSON."""

    def add(self, path: KeyPath, value: Any) -> str:
        """Add a tensor or an encoded value under a new name; return the name."""
        name = dotted(path)
        if name in self.paths:
            raise CheckpointError(
                "two values have the same name in the checkpoint",
                where=name,
                why="keys are joined by dots, and a key with a dot is ambiguous",
                fix="rename one of them in the object's state_dict()",
            )
        self.paths[name] = path
        if isinstance(value, torch.Tensor):
            self.tensors[name] = value
        else:
            self.values[name] = value
        return name

    def add_object(self, state: object, path: KeyPath) -> None:
        """Add an object's state and the layout of its names."""
        self.add((*path, LAYOUT), flatten(state, path, self)[1])


def dotted(path: KeyPath) -> str:
    """Return the flat name of a path of keys."""
    return ".".join(map(str, path))


def flatten(nested: object, path: KeyPath, into: FlatState | None = None) -> tuple[FlatState, Any]:
    """Return the leaves of nested dictionaries, lists and tuples, and their layout for `unflatten`.

    The leaves are added to `into` if it is given.
    """
    flat = FlatState() if into is None else into

    def take(value: object, path: KeyPath) -> Any:
        if isinstance(value, torch.Tensor):
            return {"tensor": flat.add(path, value)}
        if isinstance(value, Mapping) and _is_taken_apart(value):
            pairs = [[encode_value(key, dotted(path)), take(item, (*path, str(key)))] for key, item in value.items()]
            return {"mapping": pairs, **mapping_type(value)}
        if isinstance(value, list | tuple) and _is_taken_apart(value):
            items = [take(item, (*path, index)) for index, item in enumerate(value)]
            return {"list" if isinstance(value, list) else "tuple": items}
        return {"value": flat.add(path, encode_value(value, dotted(path)))}

    return flat, take(nested, path)


def unflatten(layout: Any, found: Mapping[str, Any]) -> Any:
    """Invert `flatten`, given the layout and the value of each flat name."""
    match layout:
        case {"tensor": str(name)} | {"value": str(name)}:
            return found[name]
        case {"mapping": list(pairs)}:
            return typed_mapping(layout, {decode_value(key): unflatten(item, found) for key, item in pairs})
        case {"list": list(items)}:
            return [unflatten(item, found) for item in items]
        case {"tuple": list(items)}:
            return tuple(unflatten(item, found) for item in items)
    raise unreadable_value(layout, "the layout of an object")


def _has_tensor(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)


def _is_taken_apart(value: Mapping[Any, Any] | Sequence[Any]) -> bool:
    """Whether the items get separate names: as in DCP, except that keys other than strings keep their types."""
    if isinstance(value, Mapping):
        return (bool(value) and all(type(key) is str for key in value)) or _has_tensor(value)
    return (isinstance(value, list) and any(isinstance(item, Mapping) for item in value)) or _has_tensor(value)


def encoded_random_state() -> dict[str, torch.Tensor]:
    """Return copies of the states of all random number generators in use, as bytes."""
    states = random_state().items()
    return {name: state if isinstance(state, torch.Tensor) else _as_bytes(state) for name, state in states}


def set_encoded_random_state(states: Mapping[str, torch.Tensor]) -> None:
    """Restore the random states of the generators that this process has."""
    for name, state in states.items():
        try:
            set_random_state({name: _from_bytes(state) if name in ("python", "numpy") else state})
        except (ValueError, TypeError, RuntimeError, KeyError) as error:
            raise CheckpointError(
                f"the random state of {name} cannot be restored",
                where=f"rng.{name}",
                why=str(error),
                fix="load without it: Checkpointer(..., rng=False)",
            ) from error


def seed_from_state(states: Mapping[str, torch.Tensor], rank: int) -> None:
    """Seed a rank without a saved random state from another rank's; the result is the same on every resume."""
    generator = torch.Generator()
    generator.set_state(states["torch"])
    drawn = int(torch.randint(2**62, (), device="cpu", generator=generator))
    seed_everything(drawn ^ (rank * 0x9E3779B97F4A7C15 % 2**62))


def _as_bytes(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(encode_value(value)).encode()), dtype=torch.uint8)


def _from_bytes(state: torch.Tensor) -> Any:
    return decode_value(json.loads(bytes(state.tolist()).decode()))


KINDS = "__kinds__"
"""`optim.__kinds__` lists the layouts of states that differ from their parameter's layout."""
LIVE_OPTIONS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Options of a parameter group that affect only how the step is computed; loading keeps the optimizer's own."""

Kind = str | list[str]
"""`like`: as the parameter; `plain`: whole on every rank; `local`: a plain tensor of the local shard's shape; a list:
placements of a DTensor, as in `["S(0)", "R"]`."""


@dataclass(frozen=True, slots=True)
class NamedGroup:
    """A parameter group with the names of its parameters."""

    options: dict[str, Any]
    """The live dictionary."""
    names: tuple[str, ...]
    parameters: tuple[torch.Tensor, ...]


def named_groups(optimizer: Optimizer, names: Mapping[int, str], where: str) -> list[NamedGroup]:
    """Return the optimizer's groups with parameter names, in the order of `names`.

    Groups are sorted by their first parameters, empty ones last. Ranks may list parameters in different orders (groups
    built from Python sets), as may a restarted run; the stored order must not depend on this.
    """
    groups = [tuple(group["params"]) for group in optimizer.param_groups]
    parameters = [p for group in groups for p in group]
    where = f"{where} ({type(optimizer).__name__})"
    refuse_foreign(parameters, names, "the saved models", where=where, kind=CheckpointError)
    held = {id(p) for p in parameters}
    strange = [key for key in optimizer.state if id(key) not in held and optimizer.state[key]]
    if strange:
        raise CheckpointError(
            f"the optimizer keeps state under a key that is not one of its parameters: {type(strange[0]).__name__}",
            where=where,
            why="such state cannot be stored by parameter name",
            fix="save the rest of its state as a separate object: save(..., name=object_with_state_dict)",
        )
    place = {key: index for index, key in enumerate(names)}
    ordered = [
        (options, tuple(sorted(parameters, key=lambda p: place[id(p)])))
        for options, parameters in zip(optimizer.param_groups, groups, strict=True)
    ]
    ordered.sort(key=lambda item: place[id(item[1][0])] if item[1] else len(place))
    return [NamedGroup(options, tuple(names[id(p)] for p in parameters), parameters) for options, parameters in ordered]


def collect_optimizer(found: FlatState, optimizer: Optimizer, groups: list[NamedGroup], path: KeyPath) -> None:
    """Add the optimizer's state as live tensors, under the names of torch's `get_optimizer_state_dict`."""
    kinds: dict[str, Kind] = {}
    for index, group in enumerate(groups):
        options = {key: value for key, value in group.options.items() if key != "params"}
        flatten({**options, "params": list(group.names)}, (*path, "param_groups", index), found)
        for name, parameter in zip(group.names, group.parameters, strict=True):
            start = (*path, "state", name)
            for keys, value in _leaves(optimizer.state.get(parameter) or {}, start):
                if isinstance(value, torch.Tensor):
                    key = dotted(keys[len(start) :])
                    kind = kind_of(key, value, parameter)
                    if kind != default_kind(key, tuple(value.shape), parameter):
                        kinds[f"{name}.{key}"] = kind
                    if kind == "local":
                        value = compat.dtensor_like(value, parameter)  # pyrefly: ignore[bad-argument-type]
                found.add(keys, value)
    if kinds:
        found.add((*path, KINDS), kinds)


def _leaves(state: Mapping[str, Any], start: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Yield tensors and encoded values of one parameter's state; fast for the usual case of tensors only."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            yield (*start, str(key)), value
            continue
        flat, _ = flatten(value, (*start, str(key)))
        yield from ((flat.paths[name], leaf) for name, leaf in (flat.tensors | flat.values).items())


def kind_of(key: str, tensor: torch.Tensor, parameter: torch.Tensor) -> Kind:
    """Return the layout of a state tensor relative to its parameter."""
    if isinstance(tensor, DTensor):
        if isinstance(parameter, DTensor) and _has_same_layout(tensor, parameter):
            return "like"
        return [f"S({each.dim})" if type(each) is Shard else "R" for each in tensor.placements]
    if not isinstance(parameter, DTensor):
        return "like" if tensor.shape == parameter.shape and key not in COUNTERS else "plain"
    local_shape = local_tensor(parameter).shape
    if key not in COUNTERS and tensor.ndim > 0 and tensor.shape == local_shape != parameter.shape:
        return "local"
    return "plain"


def default_kind(key: str, shape: tuple[int, ...], parameter: torch.Tensor) -> Kind:
    """Return the default layout of a state of this shape."""
    return "like" if shape == tuple(parameter.shape) and key not in COUNTERS else "plain"


def make_state(
    kind: Kind,
    key: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    parameter: torch.Tensor,
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Allocate a state tensor to load into, with the stored layout; the options decide the device of counters."""
    device = local_tensor(parameter).device
    if key in COUNTERS and not (options.get("capturable") or options.get("fused")):
        device = torch.device("cpu")
    if not isinstance(parameter, DTensor) or kind == "plain":
        return torch.empty(shape, dtype=dtype, device=device)
    if kind in ("like", "local"):
        local = torch.empty(local_tensor(parameter).shape, dtype=dtype, device=device)
        return compat.dtensor_like(local, parameter)
    placements = [Shard(int(text[2:-1])) if text.startswith("S(") else Replicate() for text in kind]
    mesh = parameter.device_mesh
    if len(placements) != mesh.ndim:  # the mesh has changed: replicating is always correct
        placements = [Replicate()] * mesh.ndim
    return empty_dtensor(shape, dtype=dtype, device_mesh=mesh, placements=placements)


def parameter_names(models: Mapping[str, list[Any]]) -> dict[int, str]:
    """Return parameter names by `id`, with the model's name as a prefix if the models are named."""
    return {
        id(entry.tensor): f"{model}.{entry.name}" if model else entry.name
        for model, entries in models.items()
        for entry in entries
        if isinstance(entry.tensor, nn.Parameter)
    }


def _has_same_layout(tensor: DTensor, parameter: DTensor) -> bool:
    ours, theirs = tensor.device_mesh, parameter.device_mesh
    same_mesh = ours is theirs or ours == theirs  # comparing meshes is slow
    return same_mesh and tensor.placements == parameter.placements and tensor.shape == parameter.shape


# In the module's `__dict__`, so that the mark has the model's lifetime.
_ATTRIBUTE = "_shardwise_unusable"


def mark_unusable(model: nn.Module, why: str) -> None:
    """Make every forward of the model and its submodules raise until `mark_usable`; call it on every rank."""
    mark_usable(model)

    def refuse(*_unused: object) -> NoReturn:
        refuse_unusable(model)
        raise AssertionError  # `mark_usable` removes both the hook and the mark

    # On every module: submodules may be called directly, and this hook must run before FSDP2's hooks.
    handles = tuple(module.register_forward_pre_hook(refuse, prepend=True) for module in model.modules())
    model.__dict__[_ATTRIBUTE] = (why, handles)


def mark_usable(model: nn.Module) -> None:
    """Undo `mark_unusable`."""
    _, handles = model.__dict__.pop(_ATTRIBUTE, ("", ()))
    for handle in handles:
        handle.remove()


def refuse_unusable(model: nn.Module) -> None:
    """Raise a CheckpointError if the model is marked; called before the model runs or is saved."""
    if _ATTRIBUTE in model.__dict__:
        raise CheckpointError(
            f"this {type(model).__name__} holds corrupt values",
            where=model.__dict__[_ATTRIBUTE][0],
            why="a checkpoint was found to be corrupt after the model was partly loaded",
            fix="load a good checkpoint into it; verify='before' verifies a checkpoint before it modifies the model",
        )


RESERVED = frozenset({"model", "optim", "optimizers", "extra", "rng", "per_rank", "step", "metric"})
EXTRA_STATE = "_extra_state"


@runtime_checkable
class Stateful(Protocol):
    """An object with a state: schedulers, scalers, averages, data loaders. Same as DCP's protocol."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as nested dictionaries of tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore the state."""
        ...


class RunObjects:
    """The objects of a run by their names in a checkpoint; raises a ConfigError if any cannot be stored."""

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizers: Optimizer | Iterable[Optimizer] | Mapping[str, Optimizer] = (),
        objects: Mapping[str, Stateful] | None = None,
        *,
        trainable_only: bool = False,
    ) -> None:
        self.trainable_only = trainable_only
        self.models = {"": model} if isinstance(model, nn.Module) else dict(model)
        self.optimizers = _by_name(optimizers)
        self.objects = dict(objects or {})
        _check_names(self)

    def tensors(self) -> dict[str, list[ModelTensor]]:
        """Return each model's parameters and persistent buffers; reshards unsharded groups first."""
        return {name: model_tensors(model) for name, model in self.models.items()}

    def groups(self, tensors: Mapping[str, list[ModelTensor]]) -> dict[str, list[NamedGroup]]:
        """Return each optimizer's groups with parameter names."""
        names = parameter_names(tensors)
        return {
            key: named_groups(optimizer, names, f"optimizers[{key!r}]" if key else "optimizers")
            for key, optimizer in self.optimizers.items()
        }

    def collect(self, *, extra: Mapping[str, Any] | None = None, rng_rank: int | None = None) -> FlatState:
        """Return this rank's current state: live tensors, and copies of values.

        `extra` adds plain values or tensors; `rng_rank` adds this process's random states as those of that rank.
        """
        found = FlatState()
        tensors = self.tensors()
        for name, model in self.models.items():
            refuse_unusable(model)
            refuse_unregistered(model, trainable_only=self.trainable_only)
            stored = [each for each in tensors[name] if not (self.trainable_only and each.is_frozen)]
            _collect_model(found, model, stored, section_path("model", name))
        for key, groups in self.groups(tensors).items():
            collect_optimizer(found, self.optimizers[key], groups, section_path("optim", key))
        for key, item in self.objects.items():
            found.add_object(item.state_dict(), (key,))
        if extra is not None:
            found.add_object(dict(extra), ("extra",))
        for name, state in encoded_random_state().items() if rng_rank is not None else ():
            found.add(("rng", str(rng_rank), name), state)
        return found

    def add_other_stages(self, found: FlatState) -> None:
        """Add the other pipeline stages' metadata to `found`, so that all stages save one model.

        Collective; call it after `collect` has succeeded on every rank.
        """
        for model in self.models.values():
            _add_other_stages(found, model)

    @property
    def elsewhere(self) -> frozenset[str]:
        """Names of parameters and buffers of other pipeline stages."""
        return frozenset().union(*map(names_elsewhere, self.models.values()))


def section_path(section: str, name: str) -> KeyPath:
    """Return the path of a model (`model`) or optimizer (`optim`) in the checkpoint; a single one has no name."""
    return (section, name) if name else (section,)


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """Return modules with extra state (`get_extra_state`) by its key in the state dict."""
    plain = nn.Module.get_extra_state
    return {
        canonical_name(f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE): module
        for path, module in model.named_modules()
        if type(module).get_extra_state is not plain
    }


def refuse_empty(tensors: Iterable[ModelTensor]) -> None:
    """Raise a CheckpointError if there are no values to save."""
    if empty := [tensor.name for tensor in tensors if tensor.tensor.is_meta]:
        raise CheckpointError(
            f"{len(empty)} tensors have no values to save",
            where=", ".join(empty[:5]),
            why="they are on the meta device",
            fix="shardwise.materialize(model), or shardwise.load_weights(model, path)",
        )


def _collect_model(found: FlatState, model: nn.Module, tensors: list[ModelTensor], path: KeyPath) -> None:
    refuse_empty(tensors)
    for entry in tensors:
        name = found.add((*path, entry.name), entry.tensor)
        for alias in entry.aliases:
            found.aliases[dotted((*path, alias))] = name
            found.paths[dotted((*path, alias))] = (*path, alias)
    for key, module in extra_states(model).items():
        found.add_object(module.get_extra_state(), (*path, key))


def _add_other_stages(found: FlatState, model: nn.Module) -> None:
    """Add the parameter groups of a pipeline's other stages. Collective over the stages."""
    state = sharded_state(model)
    if state is None or state.pipeline is None:
        return
    mine = {name: value for name, value in found.values.items() if name.startswith("optim.")}
    stages = gather_objects((mine, found.paths, found.aliases), group=state.pipeline.group)
    groups: dict[tuple[KeyPath, str, int], dict[KeyPath, Any]] = {}
    for values, paths, aliases in stages:
        _merge_groups(groups, values, paths)
        found.aliases = aliases | found.aliases
        found.paths = {name: path for name, path in (paths | found.paths).items() if _GROUPS not in path}
        for name, value in values.items():
            if _GROUPS in paths[name]:
                found.values.pop(name, None)
            elif isinstance(value, dict):  # layouts of states by name
                found.values[name] = value | found.values.get(name, {})
            else:
                found.values.setdefault(name, value)
    for number, (key, options) in enumerate(groups.items()):
        for path, value in options.items():
            full = (*key[0], _GROUPS, number, *path)
            found.values[dotted(full)], found.paths[dotted(full)] = value, full


_GROUPS = "param_groups"


def _merge_groups(
    groups: dict[tuple[KeyPath, str, int], dict[KeyPath, Any]], values: Mapping[str, Any], paths: Mapping[str, KeyPath]
) -> None:
    """Add the parameter groups of one stage; groups with the same options are merged into one."""
    found: dict[KeyPath, dict[KeyPath, Any]] = {}
    for name, value in values.items():
        if _GROUPS in (path := paths[name]):
            at = path.index(_GROUPS) + 2
            found.setdefault(path[:at], {})[path[at:]] = value
    seen: Counter[object] = Counter()
    for path, options in found.items():
        named = options.pop(("params",), [])
        kind = (path[:-2], repr(sorted(options.items(), key=repr)))
        seen[kind] += 1
        merged = groups.setdefault((*kind, seen[kind]), options)
        held = merged.setdefault(("params",), [])
        held += [name for name in named if name not in held]


def _by_name(optimizers: Any) -> dict[str, Optimizer]:
    if isinstance(optimizers, Optimizer):
        return {"": optimizers}
    if isinstance(optimizers, Mapping):
        return dict(optimizers)
    listed = list(optimizers)
    return {"": listed[0]} if len(listed) == 1 else {str(index): each for index, each in enumerate(listed)}


def _check_names(run: RunObjects) -> None:
    problems = []
    for key, module in run.models.items():
        if not isinstance(module, nn.Module):
            problems.append(f"model[{key!r}] is a {type(module).__name__}, not a module")
    for key, optimizer in run.optimizers.items():
        if not isinstance(optimizer, Optimizer):
            problems.append(f"optimizers[{key!r}] is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    for key, item in run.objects.items():
        if key in RESERVED:
            problems.append(f"{key} is a reserved name in checkpoints")
        elif isinstance(item, Optimizer | nn.Module):
            problems.append(f"{key} is a {type(item).__name__}: pass it in model= or optimizers=, by name if several")
        elif not isinstance(item, Stateful):
            problems.append(f"{key} is a {type(item).__name__}, which has no state_dict() and load_state_dict()")
    names = [*run.models, *run.optimizers, *run.objects]
    problems += [f"{name!r} contains a dot" for name in names if "." in name]
    if problems:
        raise ConfigError(
            "these objects cannot be saved in a checkpoint" if len(problems) > 1 else problems[0],
            where="\n".join(problems) if len(problems) > 1 else "Checkpointer.save and load",
            why="each is stored under its name and restored through its state dict",
            fix="pass objects with state_dict() and load_state_dict(); plain values go into extra={...}",
        )
