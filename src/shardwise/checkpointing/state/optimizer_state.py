"""An optimizer's state by parameter names: taken from the optimizer as it is, and put back without a step.

torch's own functions take one step with zero gradients to find out what state an optimizer keeps, skip it (and
return nothing) while any gradient exists, and hand out the live tensors. Here the state is what the optimizer holds
now; when loading, what the checkpoint holds decides what is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.optim import Optimizer

from shardwise import compat
from shardwise.checkpointing.state.nested import Flat, Path, flatten
from shardwise.errors import CheckpointError
from shardwise.sharding.inventory import local_tensor

KINDS = "__kinds__"
"""Under `optim.__kinds__` stand the states that are not laid out like their parameter, and how they are."""
COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})
"""State that torch's optimizers keep as plain scalars, also for a parameter that is a scalar itself."""
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
        CheckpointError: It holds a parameter of no model, or state of something that is no parameter of it.

    Ranks:
        Local.
    """
    groups = [tuple(group["params"]) for group in optimizer.param_groups]
    foreign = [p for group in groups for p in group if id(p) not in names]
    if foreign:
        shapes = ", ".join(str(tuple(p.shape)) for p in foreign[:3]) + (", …" if len(foreign) > 3 else "")
        raise CheckpointError(
            f"the optimizer holds {len(foreign)} parameters that are in none of the models: {shapes}",
            where=f"{where} ({type(optimizer).__name__})",
            why="its state is stored under the names that parameters have in the models",
            fix="pass every model whose parameters it holds; build it after sharding, or give it to shard()",
        )
    held = {id(p) for group in groups for p in group}
    strange = [key for key in optimizer.state if id(key) not in held and optimizer.state[key]]
    if strange:
        raise CheckpointError(
            f"the optimizer keeps state under a key that is none of its parameters: {type(strange[0]).__name__}",
            where=f"{where} ({type(optimizer).__name__})",
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


def collect_optimizer(optimizer: Optimizer, groups: list[NamedGroup], path: Path) -> Flat:
    """Everything the optimizer holds, under the names torch's `get_optimizer_state_dict` gives.

    Args:
        optimizer: Stepped or not.
        groups: What `named_groups` returned for it.
        path: `("optim",)`, or with the optimizer's name where there are several.

    Ranks:
        Local. The tensors are the live ones.
    """
    whole = Flat()
    kinds: dict[str, Kind] = {}
    for index, group in enumerate(groups):
        options = {key: value for key, value in group.options.items() if key != "params"}
        _merge(whole, flatten({**options, "params": list(group.names)}, (*path, "param_groups", index))[0])
        for name, parameter in zip(group.names, group.parameters, strict=True):
            state = optimizer.state.get(parameter)
            if not state:
                continue
            flat = _flat_state(state, (*path, "state", name))
            prefix = ".".join((*map(str, path), "state", name, ""))
            for full_name, tensor in flat.tensors.items():
                key = full_name.removeprefix(prefix)
                kind = kind_of(key, tensor, parameter)
                if kind != default_kind(key, tuple(tensor.shape), parameter):
                    kinds[f"{name}.{key}"] = kind
                if kind == "local":
                    flat.tensors[full_name] = compat.dtensor_like(tensor, parameter)  # pyrefly: ignore[bad-argument-type]
            _merge(whole, flat)
    if kinds:
        name = ".".join(map(str, (*path, KINDS)))
        whole.values[name], whole.paths[name] = kinds, (*path, KINDS)
    return whole


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

    Ranks:
        Local.
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


def without_layout(kind: Kind, made: torch.Tensor) -> torch.Tensor:
    """What the optimizer keeps, once `made` has its values."""
    return local_tensor(made) if kind == "local" else made


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


def _flat_state(state: dict[str, Any], path: Path) -> Flat:
    """One parameter's state; there are thousands of them, and nearly all are plain dictionaries of tensors."""
    if any(not isinstance(value, torch.Tensor) or type(key) is not str for key, value in state.items()):
        return flatten(dict(state), path)[0]
    prefix = ".".join(map(str, path))
    names = {f"{prefix}.{key}": key for key in state}
    return Flat(
        {name: state[key] for name, key in names.items()}, {}, {name: (*path, key) for name, key in names.items()}
    )


def _merge(whole: Flat, part: Flat) -> None:
    whole.tensors |= part.tensors
    whole.values |= part.values
    whole.paths |= part.paths


def _is_alike(tensor: DTensor, parameter: DTensor) -> bool:
    ours, theirs = tensor.device_mesh, parameter.device_mesh
    same_mesh = ours is theirs or ours == theirs  # comparing meshes takes long
    return same_mesh and tensor.placements == parameter.placements and tensor.shape == parameter.shape


def _placement_text(placement: Any) -> str:
    return f"S({placement.dim})" if type(placement) is Shard else "R"


def _placement(text: str) -> Shard | Replicate:
    return Shard(int(text[2:-1])) if text.startswith("S(") else Replicate()
