"""Compare the order of collectives between ranks while a sharded model runs, and raise if it differs."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from shardwise import compat
from shardwise.distributed.agreement import agree_on, gather_objects
from shardwise.distributed.collective_trace import CollectiveKind, GroupNames, encode, open_traces
from shardwise.distributed.tracer import CollectiveTracer
from shardwise.errors import ShardError
from shardwise.sharding.inventory import canonical_name, class_name
from shardwise.sharding.repointing import around_steps

_ATTRIBUTE = "_shardwise_watch"
_PATIENCE_SECONDS = 60.0
_TRACERS: dict[tuple[int, ...], tuple[weakref.ref[Any], CollectiveTracer]] = {}
"""By global ranks: the default process group, and the tracer of all models of these ranks."""


class Watch:
    """Comparison of one model's ranks until `stop` is called or the model is deleted.

    Args:
        model: The sharded model.
        tracers: One per set of ranks of its collectives; other models may share them.
        undo: Functions that remove the hooks.
    """

    def __init__(self, model: nn.Module, tracers: list[CollectiveTracer], undo: list[Callable[[], None]]) -> None:
        self.tracers = tracers
        self.stop = weakref.finalize(model, _stop, tracers, undo)
        """Stop; when its last model stops, a tracer reports to other ranks that this rank has finished."""


def _stop(tracers: list[CollectiveTracer], undo: list[Callable[[], None]]) -> None:
    for function in undo:
        function()
    for tracer in tracers:
        tracer.groups.num_models -= 1
        if not tracer.groups.num_models:
            tracer.close()


def watch(
    model: nn.Module,
    *,
    patience: float | None = None,
    machine: str | None = None,
    report: Callable[[str], None] | None = None,
) -> Watch:
    """Compare the ranks' collectives and optimizer steps from now on; replaces an earlier watch of the model.

    Collectives are compared between participating ranks: the ranks of a shard group, and for gradient reduction the
    ranks of a replica group. Replicas may evaluate independently. Models of the same ranks share one order.

    Args:
        model: Sharded by shardwise or by hand.
        patience: Seconds without progress after which a waiting rank reports the ranks it waits for. Default: a
            minute, or the value used for another model of these ranks.
        machine: Name of this machine; ranks with the same name share memory. Default: detected.
        report: Called with messages about late or diverging ranks; default: print to standard error.

    Raises:
        ShardError: The ranks of a machine cannot share memory, or called this with different models.

    Ranks:
        Collective.
    """
    if (earlier := model.__dict__.get(_ATTRIBUTE)) is not None:
        earlier.stop()
    groups = {canonical_name(name): group for name, group in compat.named_groups(model).items()}
    tracers: dict[tuple[int, ...], CollectiveTracer] = {}
    numbers: dict[CollectiveTracer, list[int]] = {}
    abort = compat.aborter(list(groups.values()))
    undo: list[Callable[[], None]] = []

    def tracer_of(process_group: Any) -> CollectiveTracer | None:
        if process_group is None or process_group.size() == 1:
            return None
        ranks = tuple(dist.get_process_group_ranks(process_group))
        if ranks not in tracers:
            agree_on(
                f"{class_name(model)}: {', '.join(groups)}",
                "the model whose collectives come next",
                group=process_group,
            )
            tracer = tracers[ranks] = _open_tracer(process_group, ranks, machine)
            numbers[tracer] = tracer.groups.add(class_name(model), list(groups))
            tracer.patience, tracer.report = patience or tracer.patience, report or tracer.report
            tracer.publishes_events = all(group.device.type == "cpu" for group in groups.values())
            tracer.aborters.append(abort)
            undo.append(functools.partial(tracer.aborters.remove, abort))
        return tracers[ranks]

    for index, group in enumerate(groups.values()):
        of_shards, of_replicas = map(tracer_of, compat.process_groups_of(group))
        if of_shards is not None:
            replicas = None if of_replicas is None else (of_replicas, numbers[of_replicas][index])
            undo.append(watch_group(group, of_shards, numbers[of_shards][index], replicas))
    for tracer in tracers.values():
        tracer.start()
    for _, tracer in _TRACERS.values():
        tracer.siblings = [other for _, other in _TRACERS.values() if other is not tracer and not other.is_closed]
    undo.append(_watch_steps(numbers, list(groups.values())))
    model.__dict__[_ATTRIBUTE] = Watch(model, list(tracers.values()), undo)
    return model.__dict__[_ATTRIBUTE]


def _open_tracer(process_group: Any, ranks: tuple[int, ...], machine: str | None) -> CollectiveTracer:
    """Return the tracer of these ranks for one more model, with new traces if a rank has no other or found an error.

    Ranks:
        Collective over the process group.
    """
    world, tracer = _TRACERS.get(ranks, (None, None))
    if tracer is None or world is None or world() is not dist.group.WORLD:
        tracer = CollectiveTracer(process_group.rank(), GroupNames(), ranks, patience=_PATIENCE_SECONDS, report=_print)
    tracer.groups.num_models += 1  # counted first: another model may be deleted at any time, and the last one closes
    try:
        state = None
        if not tracer.is_closed and tracer.error is None and machine in (None, tracer.machine):
            state = tracer.num_opened, tracer.trace.count
        states = gather_objects(state, group=process_group)
        if state is None or any(other != state for other in states):
            machine = machine or tracer.machine
            tracer.open(*open_traces(process_group, machine), machine)
    except BaseException:
        tracer.groups.num_models -= 1
        raise
    _TRACERS[ranks] = weakref.ref(dist.group.WORLD), tracer
    return tracer


def watch_by_default(model: nn.Module) -> None:
    """Watch a model sharded by shardwise; if ranks cannot share memory, report that and continue without.

    Ranks:
        Collective.
    """
    if dist.is_initialized() and dist.get_backend() != "fake":
        try:
            watch(model)
        except ShardError as error:
            _print(f"shardwise: ranks are not compared while they train\n{error}")


@contextmanager
def paused(model: nn.Module) -> Iterator[None]:
    """Trace no collectives of the model in the context, where they are not executed."""
    existing: Watch | None = model.__dict__.get(_ATTRIBUTE)
    tracers = existing.tracers if existing is not None else []
    for tracer in tracers:
        tracer.is_paused = True
    try:
        yield
    finally:
        for tracer in tracers:
            tracer.is_paused = False


def watch_group(
    group: Any, tracer: CollectiveTracer, number: int, replicas: tuple[CollectiveTracer, int] | None = None
) -> Callable[[], None]:
    """Trace a group's collectives, including reductions between replicas; return a function that stops tracing."""
    tracers = [(tracer, number)] if replicas is None else [(tracer, number), replicas]
    events: dict[tuple[CollectiveKind, int], list[int]] = {}
    write, reference = tracer.write, weakref.ref(group)

    def event(is_reduction: bool, num_elements: int, with_gradient: bool) -> None:
        if is_reduction:
            kind = CollectiveKind.REDUCE_SCATTER
        elif compat.in_backward():
            kind = CollectiveKind.ALL_GATHER_BACKWARD
        else:
            kind = CollectiveKind.ALL_GATHER_FORWARD if with_gradient else CollectiveKind.ALL_GATHER_EVALUATION
        key = kind, num_elements
        if key not in events:
            events[key] = [encode(kind, number, num_elements) for _, number in tracers]
        write(events[key][0])
        if is_reduction and replicas is not None and compat.reduces_over_replicas(reference()):
            replicas[0].write(events[key][1])

    def failed(error: Exception) -> None:
        verdict = tracer.error if error is tracer.error else tracer.explain_failure()
        if verdict is not None and verdict is not error:
            raise verdict from error

    return compat.watch_collectives(group, before=event, failed=failed, waiting=tracer.raise_error)


def _watch_steps(numbers: dict[CollectiveTracer, list[int]], groups: list[Any]) -> Callable[[], None]:
    """Trace the model's optimizer steps, and keep mixed-up gradients out of them; return a function that stops it."""
    events: dict[Any, list[int]] = {}

    def before(places: tuple[tuple[int, int], ...]) -> None:
        places = tuple(sorted(places))  # ranks may list the parameters of an optimizer in different orders
        if places not in events:
            events[places] = [
                tracer.groups.add_step([(own[group], index) for group, index in places])
                for tracer, own in numbers.items()
            ]
        for tracer, event in zip(numbers, events[places], strict=True):
            tracer.before_step(event)

    def after(_: Any) -> None:
        for tracer in numbers:
            tracer.next_step()

    return around_steps(groups, before, after)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
