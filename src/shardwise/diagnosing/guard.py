"""guard(): raise when ranks diverge, and repair what can be repaired. explained(): errors leave with cause and fix."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise import compat
from shardwise.diagnosing.check import mesh_of
from shardwise.diagnosing.collective_trace import CollectiveKind, encode, open_traces
from shardwise.diagnosing.tracer import CollectiveTracer
from shardwise.distributed.agreement import gather_over_mesh
from shardwise.errors import ShardError
from shardwise.sharding.forward_hooks import KeptUnsharded, wanting_gradient
from shardwise.sharding.gradients import BackwardEnd, UnusedParameters
from shardwise.sharding.nested_tensors import change_tensors
from shardwise.sharding.notes import annotate
from shardwise.sharding.registry import forget_when_recovered, sharded_state


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
    except BaseException as error:  # DCP's CheckpointException is no Exception
        annotate(error, model)
        raise


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
    for name in held:
        model.get_submodule(name.partition(" [")[0]).set_reshard_after_forward(False, recurse=False)  # pyrefly: ignore[not-callable]
    if held:
        _keep_unsharded(model, list(held.values()))
    done.update({0}, map(id, held.values()))
    if first_time:
        _reduce_unused(model, mesh, list(groups.values()))


def _check(model: nn.Module, mesh: DeviceMesh, towers: Sequence[str]) -> None:
    lists = gather_over_mesh(mesh, tuple(towers))
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


def _keep_unsharded(model: nn.Module, groups: list[Any]) -> None:
    """Unshard the groups on every rank when the root is entered, and free them when the pass is over."""
    kept = KeptUnsharded(groups)

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        kept.unshard()
        # When a group outside the towers reduces must not depend on whether a tower made its input.
        return change_tensors((args, kwargs), wanting_gradient) if torch.is_grad_enabled() else None

    model.register_forward_pre_hook(enter, with_kwargs=True)
    model.register_forward_hook(lambda _, args, output: kept.leave(output))


def _reduce_unused(model: nn.Module, mesh: DeviceMesh, groups: list[Any]) -> None:
    """Send zeros for parameters without a gradient, in every group whose plan does not do so already."""
    state = sharded_state(model)
    planned = set() if state is None else {id(g) for g in _groups_that_send_zeros(model, state.plan)}
    unused = UnusedParameters([group for group in groups if id(group) not in planned])
    forget_when_recovered(model, unused.forget)
    BackwardEnd(model, mesh, [], unused)


def _groups_that_send_zeros(model: nn.Module, plan: Any) -> list[Any]:
    modules = [model.get_submodule(group.modules[0]) for group in plan.groups if group.reduce_unused]
    return [group for module in modules for group in compat.groups_of(module)]


_ATTRIBUTE = "_shardwise_guard"


class Guard:
    """What `guard` returns: watches until it is closed, the model is gone, or the process ends."""

    def __init__(self, model: nn.Module, tracer: CollectiveTracer, stop: Callable[[], None]) -> None:
        self.tracer = tracer
        self._model, self._stop = weakref.ref(model), stop

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        if kind is None:
            self._raise_late()

    def close(self) -> None:
        """Stop watching, and tell the others that this rank will not come any more.

        Raises:
            ShardError: What ranks of another machine did differently just before the end is known only now.

        Ranks:
            Local.
        """
        self._end()
        self._raise_late()

    def _end(self) -> None:
        self._stop()
        if (model := self._model()) is not None:
            model.__dict__.pop(_ATTRIBUTE, None)

    def _raise_late(self) -> None:
        if self.tracer.found_at_end is not None:
            raise self.tracer.found_at_end


@contextmanager
def paused(model: nn.Module) -> Iterator[None]:
    """Within the block, a guard of the model traces no collectives: they are not real ones."""
    existing: Guard | None = model.__dict__.get(_ATTRIBUTE)
    if existing is None:
        yield
        return
    existing.tracer.is_paused = True
    try:
        yield
    finally:
        existing.tracer.is_paused = False


def guard(
    model: nn.Module,
    *,
    patience: float = 10.0,
    repair: Sequence[str] | None = None,
    machine: str | None = None,
    report: Callable[[str], None] | None = None,
) -> Guard:
    """Watch a sharded model, and raise when ranks diverge.

    Before each gather and each reduction a rank writes down what it is about to do, where the other ranks can read it,
    and compares with its neighbours. A rank that took another branch raises before it starts the wrong collective; a
    rank that waits for one that diverged, died or left the loop raises too, and one that waits for a late rank says
    so after `patience`. What other machines write arrives up to a second later.

    Args:
        model: Sharded by shardwise or by hand.
        patience: Seconds without progress after which a waiting rank says whom it waits for, and where that one is.
        repair: Names of modules that ranks may skip: such towers are gathered and reduced by all ranks, with zeros from
            those that did not run them, and zeros are sent for any parameter that a rank did not use. It costs the
            memory of keeping the towers gathered, and stays with the model. What it cannot mend still raises.
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
    groups = compat.named_groups(model)
    mesh = mesh_of(model, groups)
    if mesh is None:
        raise ShardError(
            "the model is not sharded",
            where="guard(model)",
            why="there are no groups whose collectives could be watched",
            fix="call it after shardwise.shard(model), or fully_shard",
        )
    if repair is not None:
        repair_towers(model, mesh, repair)
    existing = model.__dict__.get(_ATTRIBUTE)
    if existing is not None:
        return existing
    traces, machines, exchange, rank = open_traces(mesh, machine)
    tracer = CollectiveTracer(
        traces,
        machines,
        rank,
        tuple(groups),
        patience=patience,
        report=report or _print,
        abort=compat.aborter(list(groups.values())),
        exchange=exchange,
        publishes_events=mesh.device_type == "cpu",
    )
    unwire = [watch_group(group, number, tracer) for number, group in enumerate(groups.values())]
    unwire.append(_watch_steps(tracer, list(groups.values())))
    tracer.start()

    def stop() -> None:
        for undo in unwire:
            undo()
        unwire.clear()
        tracer.close()
        atexit.unregister(stop)

    atexit.register(stop)
    weakref.finalize(model, stop)
    model.__dict__[_ATTRIBUTE] = Guard(model, tracer, stop)
    return model.__dict__[_ATTRIBUTE]


def watch_group(group: Any, number: int, tracer: CollectiveTracer) -> Callable[[], None]:
    """Have a group's collectives written down; returns what undoes it."""
    events: dict[tuple[CollectiveKind, int], int] = {}
    write = tracer.write

    def event(is_reduction: bool, num_elements: int, with_gradient: bool) -> None:
        if is_reduction:
            kind = CollectiveKind.REDUCE
        elif compat.in_backward():
            kind = CollectiveKind.GATHER_BACKWARD
        else:
            kind = CollectiveKind.GATHER_FORWARD if with_gradient else CollectiveKind.GATHER_EVALUATION
        key = kind, num_elements
        if key not in events:
            events[key] = encode(kind, number, num_elements)
        write(events[key])

    def failed(error: Exception) -> None:
        verdict = tracer.error if error is tracer.error else tracer.explain_failure()
        if verdict is not None and verdict is not error:
            raise verdict from error

    return compat.watch_collectives(group, before=event, failed=failed, waiting=tracer.raise_error)


def _watch_steps(tracer: CollectiveTracer, groups: list[Any]) -> Callable[[], None]:
    """Count the steps of optimizers that hold this model's parameters, and keep known mix-ups out of the weights.

    Returns:
        A function that stops it.
    """
    references = [weakref.ref(group) for group in groups]
    is_ours: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()

    def holds(optimizer: Optimizer) -> bool:
        if optimizer not in is_ours:
            living = [group for reference in references if (group := reference()) is not None]
            own = {id(parameter) for group in living for parameter in compat.sharded_parameters(group)}
            held = (parameter for group in optimizer.param_groups for parameter in group["params"])
            is_ours[optimizer] = any(id(parameter) in own for parameter in held)
        return is_ours[optimizer]

    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if tracer.error is not None and holds(optimizer):
            tracer.raise_error()

    def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if holds(optimizer):
            tracer.next_step()

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)

    def stop() -> None:
        for hook in hooks:
            hook.remove()

    return stop


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
