"""Before each `optimizer.step()`: refuse an optimizer that was left behind, drop stale gathered copies."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise import compat
from shardwise.errors import ShardError
from shardwise.sharding.inventory import class_name
from shardwise.sharding.registry import sharded_roots
from shardwise.sharding.state_order import follow_names


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
        if (group := reference()) is not None and not compat.is_settled(group):
            compat.settle(group)


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
