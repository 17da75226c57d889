"""guard(model, repair=...): ranks that skip a tower stay in step with those that run it.

A tower takes part on every rank, whether it runs there or not: it is gathered when a forward begins, kept until
backward ends, and reduced then, with zeros from the ranks that did not use it. So no rank's branch decides which
collectives there are, nor their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import compat
from shardwise.diagnosing.opening import gather_from
from shardwise.errors import ShardError
from shardwise.sharding.entering import wanting_gradient
from shardwise.sharding.gradients import BackwardEnd, UnusedParameters
from shardwise.sharding.inputs import change_tensors
from shardwise.sharding.outputs import differentiable
from shardwise.sharding.registry import forget_when_recovered, sharded_state

_REPAIRED = "_shardwise_repaired"


def repair_towers(model: nn.Module, mesh: DeviceMesh, towers: Sequence[str]) -> None:
    """Let ranks skip the named modules, and use any parameter or none, from now on.

    It stays with the model when the guard is closed. Where nobody used a parameter it has no gradient, as in one
    process.

    Args:
        model: The root, sharded by shardwise or by hand.
        mesh: The ranks that take part.
        towers: Names of modules; the groups at and below each stay gathered for a whole pass. May be empty.

    Raises:
        ShardError: A name is not that of a module below the root, or ranks name different ones.

    Ranks:
        Collective.
    """
    _check(model, mesh, towers)
    done: set[int] = model.__dict__.setdefault(_REPAIRED, set())
    first_time, groups = not done, compat.named_groups(model)
    held = {name: group for name, group in groups.items() if _is_within(name, towers) and id(group) not in done}
    for name, group in held.items():
        model.get_submodule(name.partition(" [")[0]).set_reshard_after_forward(False, recurse=False)  # pyrefly: ignore[not-callable]
        compat.reduce_when_backward_ends(group)
    if held:
        _hold(model, list(held.values()))
    done.update({0}, map(id, held.values()))
    if first_time:
        _reduce_unused(model, mesh, list(groups.values()))


def _check(model: nn.Module, mesh: DeviceMesh, towers: Sequence[str]) -> None:
    lists = gather_from(mesh, tuple(towers))
    known = {name for name, _ in model.named_modules() if name}
    if any(other != lists[0] for other in lists):
        raise ShardError(
            f"ranks want to repair different modules: {sorted(set(lists))}",
            where="guard(model, repair=...)",
            why="a tower is gathered and reduced by all ranks together",
            fix="give the same names on every rank",
        )
    for name in towers:
        if name not in known:
            raise ShardError(
                f"there is no module `{name}` below the root",
                where="guard(model, repair=...)",
                why="each name is that of a module that ranks may skip, as in model.named_modules()",
                fix=f"one of {', '.join(sorted(known)[:8])}, ...",
            )


def _is_within(name: str, towers: Sequence[str]) -> bool:
    return any(name.partition(" [")[0] == tower or name.startswith(f"{tower}.") for tower in towers)


def _hold(model: nn.Module, groups: list[Any]) -> None:
    """Gather the groups on every rank when the root is entered, and free them when the pass is over."""

    def gather(*_: Any) -> None:
        for group in groups:
            compat.gather_group(group)

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        gather()
        # When a group outside the towers reduces must not depend on whether a tower made its input.
        return change_tensors((args, kwargs), wanting_gradient) if torch.is_grad_enabled() else None

    def leave(_: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in differentiable(output):
                tensor.register_hook(gather)  # an earlier backward may have freed them
        elif not compat.in_backward():
            for group in groups:
                compat.reshard_group(group)

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(leave)


def _reduce_unused(model: nn.Module, mesh: DeviceMesh, groups: list[Any]) -> None:
    """Send zeros for parameters without a gradient, in every group whose plan does not do so already."""
    state = sharded_state(model)
    planned = set() if state is None else {id(g) for g in _groups_that_send_zeros(model, state.plan)}
    unused = UnusedParameters([group for group in groups if id(group) not in planned])
    forget_when_recovered(model, unused.forget)
    BackwardEnd(model, mesh, [], unused, () if state is None else state.before_sum)


def _groups_that_send_zeros(model: nn.Module, plan: Any) -> list[Any]:
    modules = [model.get_submodule(group.modules[0]) for group in plan.groups if group.reduce_unused]
    return [group for module in modules for group in compat.state_param_groups(compat.fsdp_state(module))]
