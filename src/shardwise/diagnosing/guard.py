"""guard(): raise when ranks diverge, or repair. explained(): add cause and fix to errors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import compat
from shardwise.diagnosing.check import mesh_of
from shardwise.distributed.agreement import agree_on
from shardwise.errors import ShardError
from shardwise.models.nested_tensors import change_tensors
from shardwise.planning.calls import is_within
from shardwise.sharding.hooks.error_notes import annotate
from shardwise.sharding.hooks.forward_hooks import KeptUnsharded, wanting_gradient
from shardwise.sharding.hooks.gradients import BackwardEnd, UnusedParameters
from shardwise.sharding.hooks.watching import Watch, watch
from shardwise.sharding.parallel.tensor_parallel import tensor_of
from shardwise.sharding.registry import on_recover, sharded_state


@contextmanager
def explained(model: nn.Module) -> Iterator[None]:
    """Add a note to any error that leaves the block: module, group, caller's line, cause and fix.

    The error keeps its type and its traceback. Errors in the forward of a model sharded by `shard` always get the
    note; use this context for `loss.backward()` and `optimizer.step()`.

    Args:
        model: Sharded by shardwise or by hand.

    Ranks:
        Local.
    """
    try:
        yield
    except BaseException as error:  # DCP's CheckpointException is not an Exception
        annotate(error, model)
        raise


_REPAIRED = "_shardwise_repaired"


def repair_towers(model: nn.Module, mesh: DeviceMesh, towers: Sequence[str]) -> None:
    """Allow ranks to skip the named modules and any parameters; collective.

    The groups of each module and its submodules stay unsharded for a whole pass. The repair remains after the guard is
    closed. A parameter that no rank used has no gradient, as in one process.
    """
    fix = "guard(model, repair=...) with the same names on every rank: all of them unshard and reduce a tower"
    agree_on("\n".join(towers), "the modules to repair", fix=fix, group=mesh)
    known = {name for name, _ in model.named_modules() if name}
    for name in towers:
        if name not in known:
            raise ShardError(
                f"there is no module `{name}` below the root",
                where="guard(model, repair=...)",
                why="each name is a module that ranks may skip, as in model.named_modules()",
                fix=f"one of {', '.join(sorted(known)[:8])}, ...",
            )
    done: set[int] = model.__dict__.setdefault(_REPAIRED, set())
    first_time, groups, kept = not done, compat.named_groups(model), []
    for name, group in groups.items():
        module = name.partition(" [")[0]
        if id(group) not in done and any(is_within(module, tower) for tower in towers):
            model.get_submodule(module).set_reshard_after_forward(False, recurse=False)  # pyrefly: ignore[not-callable]
            kept.append(group)
    if kept:
        _keep_unsharded(model, kept)
    done.update({0}, map(id, kept))
    if first_time:  # reduce zeros for unused parameters, in groups whose plan does not do so already
        state = sharded_state(model)
        planned = [] if state is None else [group.modules[0] for group in state.plan.groups if group.reduce_unused]
        sending = {id(group) for name in planned for group in compat.groups_of(model.get_submodule(name))}
        unused = UnusedParameters([group for group in groups.values() if id(group) not in sending])
        on_recover(model, unused.forget)
        BackwardEnd(model, mesh, [], unused)


def _keep_unsharded(model: nn.Module, groups: list[Any]) -> None:
    """Unshard the groups on every rank from the root's forward to the end of the pass."""
    kept = KeptUnsharded(groups)

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        kept.unshard()
        # The order of reductions outside the towers must not depend on whether the input requires a gradient.
        return change_tensors((args, kwargs), wanting_gradient) if torch.is_grad_enabled() else None

    model.register_forward_pre_hook(enter, with_kwargs=True)

    def leave(_: nn.Module, args: Any, output: Any) -> None:
        kept.leave(output, is_recorded=torch.is_grad_enabled() or compat.in_backward())

    model.register_forward_hook(leave)


_ATTRIBUTE = "_shardwise_guard"


class Guard:
    """Handle of `guard`, active until it is closed, the model is deleted, or the process ends."""

    def __init__(self, model: nn.Module, watching: Watch) -> None:
        self.tracers = watching.tracers
        self._model, self._stop = weakref.ref(model), watching.stop

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if (model := self._model()) is not None:
            model.__dict__.pop(_ATTRIBUTE, None)
            if (tensors := tensor_of(model)) is not None:
                tensors.checks_all_inputs = False
        for tracer in self.tracers if kind is None else ():
            if tracer.found_at_end is not None:
                raise tracer.found_at_end

    def close(self) -> None:
        """Stop the guard, and record that this rank has left.

        Raises:
            ShardError: Ranks of another machine diverged just before the end.

        Ranks:
            Local.
        """
        self.__exit__(None, None, None)


def guard(
    model: nn.Module,
    *,
    patience: float = 10.0,
    repair: Sequence[str] | None = None,
    machine: str | None = None,
    report: Callable[[str], None] | None = None,
) -> Guard:
    """Guard a sharded model, and raise when ranks diverge.

    `shard` guards models by default, with a patience of a minute; this function also repairs, reports late ranks
    sooner, and supports models sharded by hand. Before each all-gather, reduce-scatter and optimizer step a rank
    records the event for the other ranks, and compares it with its neighbors. A rank that diverges raises before it
    starts the wrong collective; a rank that waits for one that diverged, died or left the loop raises too, and one that
    waits for a late rank reports it after `patience`. Closing the guard ends all comparisons. With tensor parallelism
    the inputs of every forward, not only of some, are compared between the ranks that share them.

    Args:
        model: Sharded by shardwise or by hand.
        patience: Seconds without progress after which a waiting rank reports the rank it waits for, and its stack.
        repair: Names of modules that ranks may skip: all ranks unshard and reduce such towers, with zeros from ranks
            that did not run them, and ranks reduce zeros for any unused parameter. The towers stay unsharded, which
            costs memory, and the repair remains after the guard is closed. Other divergences still raise.
        machine: Name of this machine; ranks with the same name share memory. Default: detected.
        report: Receives messages about ranks that are late or diverge; default: print to standard error.

    Returns:
        The guard; when training ends, call `close()`, or use it as a context manager.

    Raises:
        ShardError: Raised later, by calls of the model.

    Ranks:
        Collective. Afterward a single machine uses no network; of several machines, one rank each exchanges a few
        hundred bytes with some others, four times per second, in a thread.
    """
    mesh = mesh_of(model, compat.named_groups(model))
    if mesh is None:
        raise ShardError(
            "the model is not sharded",
            where="guard(model)",
            why="there are no groups whose collectives could be compared",
            fix="call it after shardwise.shard(model), or fully_shard",
        )
    if repair is not None:
        repair_towers(model, mesh, repair)
    if _ATTRIBUTE not in model.__dict__:
        watching = watch(model, patience=patience, machine=machine, report=report)
        model.__dict__[_ATTRIBUTE] = Guard(model, watching)
        if (tensors := tensor_of(model)) is not None:
            tensors.checks_all_inputs = True
    return model.__dict__[_ATTRIBUTE]
