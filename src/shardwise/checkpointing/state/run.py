"""A run's objects as one table of tensors and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from shardwise.checkpointing.contents import KeyPath
from shardwise.checkpointing.state.names import canonical_name
from shardwise.checkpointing.state.nested import FlatState, dotted, encoded_random_state
from shardwise.checkpointing.state.optimizer_state import NamedGroup, collect_optimizer, named_groups, parameter_names
from shardwise.checkpointing.state.slices import ModelTensor, model_tensors
from shardwise.distributed.agreement import gather_objects
from shardwise.errors import CheckpointError, ConfigError
from shardwise.sharding.registry import names_elsewhere, sharded_state

# In the module's own dict, so that the mark lives as long as the model.
_ATTRIBUTE = "_shardwise_unusable"


def mark_unusable(model: nn.Module, why: str) -> None:
    """Let every forward in the model's tree raise, until `mark_usable`.

    Args:
        model: Some of its values are not to be trusted.
        why: What was found, for the error.

    Ranks:
        Local. Mark it on every rank, or the others wait for this one in their next collective.
    """
    mark_usable(model)

    def refuse(*_unused: object) -> NoReturn:
        refuse_unusable(model)
        raise AssertionError  # the hook goes with the mark

    # On every module: parts of a model are called on their own, and FSDP2's hooks must not run first.
    handles = tuple(module.register_forward_pre_hook(refuse, prepend=True) for module in model.modules())
    model.__dict__[_ATTRIBUTE] = (why, handles)


def mark_usable(model: nn.Module) -> None:
    """Take the mark away: all values were written anew."""
    _, handles = model.__dict__.pop(_ATTRIBUTE, ("", ()))
    for handle in handles:
        handle.remove()


def refuse_unusable(model: nn.Module) -> None:
    """Raise if the model is marked; called before it is run or saved.

    Raises:
        CheckpointError: With what was found.
    """
    if _ATTRIBUTE in model.__dict__:
        raise CheckpointError(
            f"this {type(model).__name__} holds corrupt values",
            where=model.__dict__[_ATTRIBUTE][0],
            why="a checkpoint turned out corrupt after part of it had been written into the model",
            fix="load a good checkpoint into it; verify='before' proves a checkpoint before it touches the model",
        )


RESERVED = frozenset({"model", "optim", "optimizers", "extra", "rng", "per_rank", "step", "metric"})
EXTRA_STATE = "_extra_state"


@runtime_checkable
class Stateful(Protocol):
    """Anything with a state: schedulers, scalers, averages, data loaders. The same as DCP's."""

    def state_dict(self) -> dict[str, Any]:
        """The state as nested dictionaries of tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take such a state over."""
        ...


class Run:
    """The objects of a run, under the names that they have in a checkpoint.

    Args:
        model: A module, or several by name.
        optimizers: One, several, or several by name.
        objects: Anything with `state_dict` and `load_state_dict`, by name.
        trainable_only: Leave frozen parameters out.

    Raises:
        ConfigError: An object has no state, or a name that means something else.
    """

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
        """Each model's parameters and persistent buffers; gathered groups are sharded again first."""
        return {name: model_tensors(model) for name, model in self.models.items()}

    def groups(self, tensors: Mapping[str, list[ModelTensor]]) -> dict[str, list[NamedGroup]]:
        """Each optimizer's groups, with the names of their parameters."""
        names = parameter_names(tensors)
        return {
            key: named_groups(optimizer, names, f"optimizers[{key!r}]" if key else "optimizers")
            for key, optimizer in self.optimizers.items()
        }

    def collect(self, *, extra: Mapping[str, Any] | None = None, rng_rank: int | None = None) -> FlatState:
        """The state now. Tensors are the live ones, values are copies.

        Args:
            extra: Further plain values (or tensors) to keep.
            rng_rank: Keep this process's random numbers, as those of that rank; None: do not.

        Raises:
            CheckpointError: Something cannot be stored, or a model holds corrupt values.
        """
        found = FlatState()
        tensors = self.tensors()
        for name, model in self.models.items():
            refuse_unusable(model)
            stored = [each for each in tensors[name] if not (self.trainable_only and each.is_frozen)]
            _collect_model(found, model, stored, section_path("model", name))
        for key, groups in self.groups(tensors).items():
            collect_optimizer(found, self.optimizers[key], groups, section_path("optim", key))
        for key, item in self.objects.items():
            found.add_object(
                item.state_dict(), (key,), unchanged_until_step=bool(getattr(item, "waits_for_copies", False))
            )
        if extra is not None:
            found.add_object(dict(extra), ("extra",))
        for name, state in encoded_random_state().items() if rng_rank is not None else ():
            found.add(("rng", str(rng_rank), name), state)
        for model in self.models.values():
            _add_other_stages(found, model)
        return found

    @property
    def elsewhere(self) -> frozenset[str]:
        """Names of parameters and buffers that other pipeline stages hold."""
        return frozenset().union(*map(names_elsewhere, self.models.values()))


def section_path(section: str, name: str) -> KeyPath:
    """Where a model (`model`) or an optimizer (`optim`) stands in the checkpoint; a single one has no name."""
    return (section, name) if name else (section,)


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that keep something of their own in the state dict (`get_extra_state`), by its name there."""
    plain = nn.Module.get_extra_state
    return {
        canonical_name(f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE): module
        for path, module in model.named_modules()
        if type(module).get_extra_state is not plain
    }


def _collect_model(found: FlatState, model: nn.Module, tensors: list[ModelTensor], path: KeyPath) -> None:
    for entry in tensors:
        if entry.tensor.is_meta:
            raise CheckpointError(
                "a tensor on the meta device has no values to save",
                where=entry.name,
                why="the model was built on the meta device and not materialised since",
                fix="shardwise.materialize(model), or load weights into it",
            )
        # A forward may write a buffer (running statistics); only a step, or somebody by hand, writes parameters.
        name = found.add((*path, entry.name), entry.tensor, unchanged_until_step=entry.is_parameter)
        for alias in entry.aliases:
            found.aliases[dotted((*path, alias))] = name
            found.paths[dotted((*path, alias))] = (*path, alias)
    for key, module in extra_states(model).items():
        found.add_object(module.get_extra_state(), (*path, key))


def _add_other_stages(found: FlatState, model: nn.Module) -> None:
    """Describe what other pipeline stages hold of a model as this rank does, so that all stages save one model.

    Ranks:
        Collective over the ranks of the pipeline, where the model is a stage of one.
    """
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
            elif isinstance(value, dict):  # layouts of states, by name
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
    """Add the parameter groups of one stage: those with the same options are one group of the whole model."""
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


def _check_names(run: Run) -> None:
    problems = []
    for key, module in run.models.items():
        if not isinstance(module, nn.Module):
            problems.append(f"model[{key!r}] is a {type(module).__name__}, not a module")
    for key, optimizer in run.optimizers.items():
        if not isinstance(optimizer, Optimizer):
            problems.append(f"optimizers[{key!r}] is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    for key, item in run.objects.items():
        if key in RESERVED:
            problems.append(f"{key} is a name that checkpoints use themselves")
        elif isinstance(item, Optimizer | nn.Module):
            problems.append(f"{key} is a {type(item).__name__}: pass it in model= or optimizers=, by name if several")
        elif not isinstance(item, Stateful):
            problems.append(f"{key} is a {type(item).__name__}, which has no state_dict() and load_state_dict()")
    names = [*run.models, *run.optimizers, *run.objects]
    problems += [f"{name!r} has a dot in it" for name in names if "." in name]
    if problems:
        raise ConfigError(
            "a checkpoint cannot be made of these objects" if len(problems) > 1 else problems[0],
            where="\n".join(problems) if len(problems) > 1 else "Checkpointer.save and load",
            why="each is stored under its name and restored through its state dict",
            fix="pass objects with state_dict() and load_state_dict(); plain values go into extra={...}",
        )
