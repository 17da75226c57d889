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

    The error keeps its type and its traceback. Errors in the forward of a model that `shard` sharded carry the note
    anyhow; around `loss.backward()` and `optimizer.step()` this is what adds it.

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

    The groups at and below each stay unsharded for a whole pass. It stays with the model when the guard is closed.
    Where nobody used a parameter it has no gradient, as in one process.
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
    if first_time:  # send zeros for parameters without a gradient, in every group whose plan does not do so already
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
        # The order of reductions outside the towers must not depend on whether a tower made the input.
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
            ShardError: What ranks of another machine did differently just before the end is known only now.

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

    `shard` does so by itself, with a patience of a minute; this one also repairs, reports late ranks sooner, and takes
    models that were sharded by hand. Before each all-gather, reduce-scatter and optimizer step a rank writes down what
    it is about to do, where the other ranks can read it, and compares with its neighbours. A rank that took another
    branch raises before it starts the wrong collective; a rank that waits for one that diverged, died or left the loop
    raises too, and one that waits for a late rank reports it after `patience`. Close it, and nothing is compared. With
    tensor parallelism the inputs of each forward are compared between the ranks that share them, not only of some.

    Args:
        model: Sharded by shardwise or by hand.
        patience: Seconds without progress after which a waiting rank reports the rank it waits for, and its stack.
        repair: Names of modules that ranks may skip: all ranks unshard and reduce such towers, with zeros from those
            that did not run them, and zeros are sent for any parameter that a rank did not use. It costs the
            memory of keeping the towers unsharded, and stays with the model. What it cannot repair still raises.
        machine: The name of this machine; ranks of the same name share memory. Default: found out.
        report: Gets what is said about ranks that are late or diverge; default: print to standard error.

    Returns:
        The guard; `close()` it, or use it as a context, when training ends.

    Raises:
        ShardError: Later, from the model's own calls.

    Ranks:
        Collective. Afterwards it sends nothing over the network, unless there are several machines: then one rank of
        each exchanges a few hundred bytes with some others, four times a second, from a thread.
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
