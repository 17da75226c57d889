"""Optimizers built before sharding: remember whose parameters they hold, then point them at the shards."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise import compat
from shardwise.errors import ShardError
from shardwise.sharding.layout import local_part
from shardwise.sharding.state_order import follow_names
from shardwise.sharding.watching import watch_optimizers

__all__ = ["Remembered", "remember_parameters", "repoint", "watch_optimizers"]

# Counters that torch's optimizers keep per parameter. They stay plain tensors even for a parameter that is
# itself a scalar, because the optimizers hand them to foreach kernels in lists of their own.
_COUNTERS = {"step", "mu_product", "eta", "mu"}


@dataclass(frozen=True, slots=True)
class Remembered:
    """Which parameter, by name, stands where in each optimizer."""

    names: tuple[tuple[tuple[str, ...], ...], ...]
    """Optimizer, parameter group, place in the group."""


def remember_parameters(model: nn.Module, optimizers: Iterable[Optimizer]) -> Remembered:
    """Note the name of each parameter that the optimizers hold, before sharding replaces them.

    Args:
        model: Not sharded yet.
        optimizers: Built on `model.parameters()` or a part of them, stepped or not.

    Raises:
        ShardError: An optimizer holds a parameter of another model, holds one twice, or has state that cannot
            be split like its parameter. Nothing has been changed then.

    Ranks:
        Local.
    """
    name_of: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name_of.setdefault(id(parameter), name)
    return Remembered(tuple(_names_in(optimizer, index, name_of, model) for index, optimizer in enumerate(optimizers)))


def repoint(optimizers: Sequence[Optimizer], remembered: Remembered, model: nn.Module) -> None:
    """Replace the remembered parameters by the model's present ones, in place.

    Groups, their order and options stay; state of a parameter's shape is split as the parameter is, each rank
    keeping its part. The optimizer objects stay the same, so learning-rate schedulers keep working.

    Args:
        optimizers: The same as given to `remember_parameters`, in the same order.
        remembered: What it returned.
        model: Sharded since.

    Ranks:
        Local. No communication: every rank holds the whole state and keeps its own part.
    """
    current = dict(model.named_parameters(remove_duplicate=False))
    for optimizer, groups in zip(optimizers, remembered.names, strict=True):
        follow_names(optimizer)
        for group, names in zip(optimizer.param_groups, groups, strict=True):
            old = list(group["params"])
            new = [current[name] for name in names]
            group["params"][:] = new  # in place: LBFGS keeps a reference to the list
            for before, after in zip(old, new, strict=True):
                if before is not after and before in optimizer.state:
                    state = optimizer.state.pop(before)
                    optimizer.state[after] = {
                        key: _split(value, before, after) if _is_split(key, value, before) else value
                        for key, value in state.items()
                    }


def shard_like(full: torch.Tensor, parameter: DTensor) -> DTensor:
    """This rank's part of `full` as a DTensor placed like `parameter`, with storage of its own.

    Ranks:
        Local. Every rank must hold the same `full`.
    """
    local = local_part(full, parameter).to(
        device=parameter.to_local().device, copy=True, memory_format=torch.contiguous_format
    )
    return compat.dtensor_like(local, parameter)


def _names_in(
    optimizer: Optimizer, index: int, name_of: dict[int, str], model: nn.Module
) -> tuple[tuple[str, ...], ...]:
    where = f"optimizers[{index}] ({type(optimizer).__name__})"
    groups, seen = [], set()
    for number, group in enumerate(optimizer.param_groups):
        foreign = [p for p in group["params"] if id(p) not in name_of]
        if foreign:
            raise _not_of_model(f"{where}, param_groups[{number}]", foreign, len(group["params"]), model)
        names = [name_of[id(parameter)] for parameter in group["params"]]
        for name in names:
            if name in seen:
                raise ShardError(
                    f"the optimizer holds {name} twice",
                    where=f"{where}, param_groups[{number}]",
                    why="a parameter that stands twice is stepped twice",
                    fix="give each parameter to one group only",
                )
            seen.add(name)
        for name, parameter in zip(names, group["params"], strict=True):
            _refuse_state(where, name, optimizer.state.get(parameter, {}), parameter)
        groups.append(tuple(names))
    return tuple(groups)


def _not_of_model(where: str, foreign: list[torch.Tensor], num_params: int, model: nn.Module) -> ShardError:
    shapes = ", ".join(str(tuple(p.shape)) for p in foreign[:3]) + (", …" if len(foreign) > 3 else "")
    return ShardError(
        f"{len(foreign)} of {num_params} parameters are not parameters of {type(model).__name__}: {shapes}",
        where=where,
        why="an optimizer is re-pointed by the names its parameters have in the model",
        fix="pass the optimizer with its own model, or build it after sharding",
    )


def _refuse_state(where: str, name: str, state: dict[str, Any], parameter: torch.Tensor) -> None:
    for key, value in state.items():
        for tensor in _tensors(value):
            carried = tensor is value and _is_split(key, tensor, parameter)
            if not carried and tensor.ndim > 0:
                raise ShardError(
                    f"state {key!r} of {name} has shape {tuple(tensor.shape)}, the parameter {tuple(parameter.shape)}",
                    where=where,
                    why="only state of the parameter's own shape can be split as the parameter is; "
                    "factored or flattened state cannot",
                    fix="build the optimizer after sharding; its state then starts fresh",
                )


def _is_split(key: str, value: object, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and key not in _COUNTERS and value.shape == parameter.shape


def _split(value: torch.Tensor, before: torch.Tensor, after: nn.Parameter) -> torch.Tensor:
    # Where the plan changes the storage dtype, state kept in the old one would no longer match the gradients.
    full = value.to(after.dtype) if value.dtype == before.dtype else value
    if isinstance(after, DTensor):
        return shard_like(full, after)
    return full.to(after.device)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
