"""An optimizer's state by parameter names: taken from the optimizer as it is, and put back without a step.

torch's own functions take one step with zero gradients to find out what state an optimizer keeps, skip it (and
return nothing) while any gradient exists, and hand out the live tensors. Here the state is what the optimizer holds
now; when loading, what the checkpoint holds decides what is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.optim import Optimizer

from shardwise import compat
from shardwise.checkpointing.contents import KeyPath
from shardwise.checkpointing.state.nested import FlatState, dotted, flatten
from shardwise.errors import CheckpointError
from shardwise.sharding.inventory import local_tensor
from shardwise.sharding.repointing import COUNTERS, refuse_foreign

KINDS = "__kinds__"
"""Under `optim.__kinds__` stand the states that are not laid out like their parameter, and how they are."""
LIVE_OPTIONS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Of a parameter group: how to compute, not what. Those of the running optimizer are kept."""

Kind = str | list[str]
"""`like` the parameter; `plain`: whole on every rank; `local`: a plain tensor of the local part's shape; else the
placements of a DTensor, as in `["S(0)", "R"]`."""


@dataclass(frozen=True, slots=True)
class NamedGroup:
    """A parameter group with the names of its parameters."""

    options: dict[str, Any]
    """The live dictionary."""
    names: tuple[str, ...]
    parameters: tuple[torch.Tensor, ...]


def named_groups(optimizer: Optimizer, names: Mapping[int, str], where: str) -> list[NamedGroup]:
    """The optimizer's groups, with parameter names, in the models' order and not in the optimizer's.

    Groups stand in the order of their first parameters, empty ones last. Ranks may list parameters in different orders
    (groups built from Python sets), and so may a run after a restart; what is stored must not depend on it.

    Args:
        optimizer: Holds parameters of the models only.
        names: From the `id` of each parameter of the models to its name, in the models' order.
        where: For the error.

    Raises:
        CheckpointError: It holds a parameter of no model, or state of something that is not a parameter of it.
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
            fix="save the rest of its state as an object of its own: save(..., name=object_with_state_dict)",
        )
    place = {key: index for index, key in enumerate(names)}
    ordered = [
        (options, tuple(sorted(parameters, key=lambda p: place[id(p)])))
        for options, parameters in zip(optimizer.param_groups, groups, strict=True)
    ]
    ordered.sort(key=lambda item: place[id(item[1][0])] if item[1] else len(place))
    return [NamedGroup(options, tuple(names[id(p)] for p in parameters), parameters) for options, parameters in ordered]


def collect_optimizer(found: FlatState, optimizer: Optimizer, groups: list[NamedGroup], path: KeyPath) -> None:
    """Add everything the optimizer holds, under the names torch's `get_optimizer_state_dict` gives.

    Args:
        found: Is added to.
        optimizer: Stepped or not.
        groups: What `named_groups` returned for it.
        path: `("optim",)`, or with the optimizer's name where there are several.

    Ranks:
        Local. The tensors are the live ones.
    """
    kinds: dict[str, Kind] = {}
    for index, group in enumerate(groups):
        options = {key: value for key, value in group.options.items() if key != "params"}
        flatten(
            {**options, "params": list(group.names)}, (*path, "param_groups", index), found, unchanged_until_step=True
        )
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
                found.add(keys, value, unchanged_until_step=True)
    if kinds:
        found.add((*path, KINDS), kinds)


def _leaves(state: Mapping[str, Any], start: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Tensors and encoded values of one parameter's state; there are thousands, nearly all of tensors only."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            yield (*start, str(key)), value
            continue
        flat, _ = flatten(value, (*start, str(key)))
        yield from ((flat.paths[name], leaf) for name, leaf in (flat.tensors | flat.values).items())


def kind_of(key: str, tensor: torch.Tensor, parameter: torch.Tensor) -> Kind:
    """How a state tensor is laid out, compared with its parameter."""
    if isinstance(tensor, DTensor):
        if isinstance(parameter, DTensor) and _is_alike(tensor, parameter):
            return "like"
        return [_placement_text(placement) for placement in tensor.placements]
    if not isinstance(parameter, DTensor):
        return "like" if tensor.shape == parameter.shape and key not in COUNTERS else "plain"
    local_shape = local_tensor(parameter).shape
    if key not in COUNTERS and tensor.ndim > 0 and tensor.shape == local_shape != parameter.shape:
        return "local"
    return "plain"


def default_kind(key: str, shape: tuple[int, ...], parameter: torch.Tensor) -> Kind:
    """What is taken for granted of a state of that shape, where the checkpoint does not say otherwise."""
    return "like" if shape == tuple(parameter.shape) and key not in COUNTERS else "plain"


def make_state(
    kind: Kind,
    key: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    parameter: torch.Tensor,
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Memory for a state tensor that is about to be read.

    Args:
        kind: How it was laid out.
        key: Its name in the parameter's state.
        dtype: As stored.
        shape: Of the whole tensor.
        parameter: Whose state it is.
        options: Of the parameter's group; `fused` and `capturable` decide where counters live.
    """
    device = local_tensor(parameter).device
    if key in COUNTERS and not (options.get("capturable") or options.get("fused")):
        device = torch.device("cpu")
    if not isinstance(parameter, DTensor) or kind == "plain":
        return torch.empty(shape, dtype=dtype, device=device)
    if kind in ("like", "local"):
        local = torch.empty(local_tensor(parameter).shape, dtype=dtype, device=device)
        return compat.dtensor_like(local, parameter)
    placements = [_placement(text) for text in kind]
    mesh = parameter.device_mesh
    if len(placements) != mesh.ndim:  # another mesh than at the time: whole on every rank is always right
        placements = [Replicate()] * mesh.ndim
    return empty_dtensor(shape, dtype=dtype, device_mesh=mesh, placements=placements)


def parameter_names(models: Mapping[str, list[Any]]) -> dict[int, str]:
    """From the `id` of each parameter to its name: the canonical one, after the model's where models have names.

    Args:
        models: What `slices.model_tensors` gives, by the models' names; a single model's is empty.
    """
    return {
        id(entry.tensor): f"{model}.{entry.name}" if model else entry.name
        for model, entries in models.items()
        for entry in entries
        if isinstance(entry.tensor, nn.Parameter)
    }


def _is_alike(tensor: DTensor, parameter: DTensor) -> bool:
    ours, theirs = tensor.device_mesh, parameter.device_mesh
    same_mesh = ours is theirs or ours == theirs  # comparing meshes takes long
    return same_mesh and tensor.placements == parameter.placements and tensor.shape == parameter.shape


def _placement_text(placement: Any) -> str:
    return f"S({placement.dim})" if type(placement) is Shard else "R"


def _placement(text: str) -> Shard | Replicate:
    return Shard(int(text[2:-1])) if text.startswith("S(") else Replicate()
