"""Optimizers follow their parameters: repointed after sharding, watched, state kept in the model's order."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise import compat
from shardwise.errors import ShardError
from shardwise.sharding.inventory import class_name, local_part, local_tensor, unwrapped_name
from shardwise.sharding.nested_tensors import find_tensors
from shardwise.sharding.registry import sharded_roots

_FOLLOWING: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def follow_names(optimizer: Optimizer) -> None:
    """Let the state dicts of an optimizer of sharded parameters go by names; once is enough.

    Ranks:
        Local.
    """
    if optimizer not in _FOLLOWING:
        _FOLLOWING.add(optimizer)
        optimizer.register_state_dict_post_hook(_order_state)
        optimizer.register_load_state_dict_pre_hook(_order_names)


def _order_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state in the models' order, each parameter under the number that it has."""
    place = {id(parameter): index for index, (_, parameter) in enumerate(_named_parameters())}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def key(entry: Any) -> int:
        known = isinstance(entry, int) and entry < len(held)
        return place.get(id(held[entry]), len(place)) if known else len(place)

    state = state_dict["state"]
    return {**state_dict, "state": {entry: state[entry] for entry in sorted(state, key=key)}}


def _order_names(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Where groups list names instead of numbers: the same groups and names in this optimizer's order."""
    given = state_dict.get("param_groups", [])
    if not all(isinstance(name, str) for group in given for name in group["params"]):
        return None
    name_of = {id(parameter): name for name, parameter in _named_parameters()}
    live = [[name_of.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
    groups = {frozenset(group["params"]): group for group in given}
    if len(groups) != len(given) or {frozenset(names) for names in live} != groups.keys():
        return None  # torch compares them, and says what does not fit
    return {**state_dict, "param_groups": [{**groups[frozenset(names)], "params": names} for names in live]}


def _named_parameters() -> list[tuple[str, torch.Tensor]]:
    """Every parameter of every sharded model, in the order in which the models were sharded."""
    return [
        (unwrapped_name(name), parameter)
        for root in sharded_roots()
        for name, parameter in nn.Module.named_parameters(root)
    ]


@dataclass(frozen=True, slots=True)
class _Checked:
    """What is known of an optimizer since its parameters were last looked at."""

    signature: tuple[Any, ...]
    """Changes with the optimizer's parameter lists and with every newly sharded model."""
    groups: tuple[weakref.ref[Any], ...]
    """FSDP2 groups that hold parameters of this optimizer."""


_REPLACED: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
_CHECKED: weakref.WeakKeyDictionary[Optimizer, _Checked] = weakref.WeakKeyDictionary()
_num_watched = 0


def watch_optimizers(model: nn.Module, replaced: Iterable[torch.Tensor]) -> None:
    """Make every optimizer that still holds one of the `replaced` parameters fail at its next step.

    Without this such an optimizer updates tensors that the model no longer uses: the loss stays flat and
    nothing is raised. Only weak references are kept, and an optimizer is looked at once, not at every step.

    Args:
        model: The root, with its present parameters.
        replaced: The tensors it had for parameters before.

    Ranks:
        Local.
    """
    global _num_watched
    if _num_watched == 0:
        register_optimizer_step_pre_hook(_before_step)
    _num_watched += 1
    current = {id(parameter) for parameter in model.parameters()}
    for parameter in replaced:
        key = id(parameter)
        if key not in current:  # ignored parameters stay what they were
            reference = weakref.ref(parameter, lambda _, key=key: _REPLACED.pop(key, None))
            _REPLACED[key] = (reference, class_name(model))


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    lists = tuple((id(group["params"]), len(group["params"])) for group in optimizer.param_groups)
    signature = (_num_watched, lists)
    checked = _CHECKED.get(optimizer)
    if checked is None or checked.signature != signature:
        checked = _Checked(signature, _examine(optimizer))
        _CHECKED[optimizer] = checked
    for reference in checked.groups:
        # A copy gathered before the step (model.unshard(), set_reshard_after_backward(False)) would hide the
        # updated shards from the next forward.
        if (group := reference()) is not None and not compat.is_resharded(group):
            compat.wait_and_reshard(group)


def _examine(optimizer: Optimizer) -> tuple[weakref.ref[Any], ...]:
    """Raise if the optimizer holds parameters that no model uses; return the FSDP2 groups it steps."""
    places = {
        id(parameter): index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]
    }
    _refuse_replaced(optimizer, places)
    owned = []
    for root in sharded_roots():
        for group in compat.param_groups(root):
            gathered = [p for p in compat.unsharded_parameters(group) if id(p) in places]
            if gathered:
                raise _left_behind(
                    optimizer,
                    places,
                    gathered,
                    class_name(root),
                    why="the optimizer was built while the model stood gathered (after unshard(), or in a "
                    "forward): it holds the temporary copies, and the shards would never change",
                    fix="call model.reshard() before building the optimizer",
                )
            if any(id(parameter) in places for parameter in compat.sharded_parameters(group)):
                owned.append(weakref.ref(group))
    if owned:
        follow_names(optimizer)
    return tuple(owned)


def _refuse_replaced(optimizer: Optimizer, places: dict[int, int]) -> None:
    stale: list[torch.Tensor] = []
    model = ""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            reference, name = _REPLACED.get(id(parameter), (None, ""))
            if reference is not None and reference() is parameter:
                stale.append(parameter)
                model = model or name
    if stale:
        raise _left_behind(
            optimizer,
            places,
            stale,
            model,
            why="sharding replaced them; stepping the old ones would leave the model as it is",
            fix="build the optimizer after sharding, or pass it: shard(model, optimizers=[optimizer])",
        )


def _left_behind(
    optimizer: Optimizer,
    places: dict[int, int],
    stale: Sequence[torch.Tensor],
    model: str,
    *,
    why: str,
    fix: str,
) -> ShardError:
    shapes = ", ".join(str(tuple(parameter.shape)) for parameter in stale[:3]) + (", …" if len(stale) > 3 else "")
    groups = sorted({places[id(parameter)] for parameter in stale})
    return ShardError(
        f"{type(optimizer).__name__} holds {len(stale)} of {len(places)} parameters that {model} no longer uses",
        where=f"param_groups {groups}: shapes {shapes}",
        why=why,
        fix=fix,
    )


_MARK = "_shardwise_sharded"
_is_watching = False


def watch_assignments(model: nn.Module) -> None:
    """Make assignments to `.data` of the model's sharded parameters mean what they say.

    Ranks:
        Local.
    """
    global _is_watching
    if not _is_watching:
        compat.watch_data_assignment(_assign)
        _is_watching = True
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            parameter.__dict__[_MARK] = True


def _assign(parameter: DTensor, value: torch.Tensor) -> bool:
    """Copy the values in place; False leaves a tensor that is not ours to torch."""
    if _MARK not in parameter.__dict__:
        return False
    local = local_tensor(parameter)
    if value.shape != parameter.shape or value.dtype != parameter.dtype:
        raise ShardError(
            f"`.data` of a sharded parameter, {list(parameter.shape)} {parameter.dtype}, was assigned "
            f"{list(value.shape)} {value.dtype}",
            where="parameter.data = ...",
            why="its group gathers the shard it was made with; torch would ignore the assignment",
            fix="change shape or dtype before sharding; ShardConfig.precision sets the dtype of computation",
        )
    own = local_tensor(value) if isinstance(value, DTensor) else local_part(value, parameter)
    if isinstance(value, DTensor) and value.placements != parameter.placements:
        raise ShardError(
            f"`.data` of a parameter laid out as {parameter.placements} was assigned one of {value.placements}",
            where="parameter.data = ...",
            why="ranks would keep each other's parts",
            fix="assign a tensor of the same layout, or the whole tensor",
        )
    if not local.is_meta and own.data_ptr() != local.data_ptr():
        with torch.no_grad():
            local.copy_(own)
    return True


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
        for tensor in find_tensors(value):
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
