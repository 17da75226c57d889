"""Compare the order of collectives between ranks while a sharded model runs, and raise where it differs."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from shardwise import compat
from shardwise.distributed.collective_trace import CollectiveKind, encode, open_traces
from shardwise.distributed.tracer import CollectiveTracer
from shardwise.errors import ShardError
from shardwise.sharding.inventory import unwrapped_name
from shardwise.sharding.repointing import around_steps

_ATTRIBUTE = "_shardwise_watch"
_PATIENCE_SECONDS = 60.0


class Watch:
    """What compares the ranks of one model until `stop` is called or the model is gone.

    Args:
        model: Sharded.
        tracers: One for each process group.
        undo: Functions that take the hooks away.
    """

    def __init__(self, model: nn.Module, tracers: list[CollectiveTracer], undo: list[Callable[[], None]]) -> None:
        self.tracers = tracers
        self.stop = weakref.finalize(model, _stop, tracers, undo)
        """Stop, and tell the other ranks that this one will not come any more."""


def _stop(tracers: list[CollectiveTracer], undo: list[Callable[[], None]]) -> None:
    for function in undo:
        function()
    for tracer in tracers:
        tracer.close()


def watch(
    model: nn.Module,
    *,
    patience: float = _PATIENCE_SECONDS,
    machine: str | None = None,
    report: Callable[[str], None] | None = None,
) -> Watch:
    """Compare the ranks' collectives and optimizer steps from now on; replaces an earlier watch of the model.

    Collectives are compared between the ranks that take part in them: those of a shard group, and for the reduction of
    gradients those of a replica group. Replicas may evaluate on their own.

    Args:
        model: Sharded by shardwise or by hand.
        patience: Seconds without progress after which a waiting rank reports whom it waits for.
        machine: The name of this machine; ranks of the same name share memory. Default: detected.
        report: Called with messages about ranks that are late or diverge; default: print to standard error.

    Raises:
        ShardError: The ranks of a machine cannot share memory.

    Ranks:
        Collective.
    """
    if (earlier := model.__dict__.get(_ATTRIBUTE)) is not None:
        earlier.stop()
    groups = {unwrapped_name(name): group for name, group in compat.named_groups(model).items()}
    tracers: dict[str, CollectiveTracer] = {}

    def tracer_of(process_group: Any) -> CollectiveTracer | None:
        if process_group is None or process_group.size() == 1:
            return None
        if process_group.group_name not in tracers:
            traces, machines, exchange = open_traces(process_group, machine)
            tracers[process_group.group_name] = CollectiveTracer(
                traces,
                machines,
                process_group.rank(),
                tuple(groups),
                patience=patience,
                report=report or _print,
                abort=compat.aborter(list(groups.values())),
                global_ranks=dist.get_process_group_ranks(process_group),
                exchange=exchange,
                publishes_events=next(iter(groups.values())).device.type == "cpu",
            )
        return tracers[process_group.group_name]

    undo = []
    for number, group in enumerate(groups.values()):
        of_shards, of_replicas = map(tracer_of, compat.process_groups_of(group))
        if of_shards is not None:
            undo.append(watch_group(group, number, of_shards, of_replicas))
    for tracer in tracers.values():
        tracer.siblings = [other for other in tracers.values() if other is not tracer]
        tracer.start()
    undo.append(_watch_steps(list(tracers.values()), list(groups.values())))
    model.__dict__[_ATTRIBUTE] = Watch(model, list(tracers.values()), undo)
    return model.__dict__[_ATTRIBUTE]


def watch_by_default(model: nn.Module) -> None:
    """Watch a model that shardwise has sharded; where ranks cannot share memory, report that and go on without.

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
    """Within the block, no collectives of the model are traced: they are not real ones."""
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
    group: Any, number: int, tracer: CollectiveTracer, of_replicas: CollectiveTracer | None = None
) -> Callable[[], None]:
    """Have a group's collectives traced, reductions also between replicas; returns a function that stops it."""
    events: dict[tuple[CollectiveKind, int], int] = {}
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
            events[key] = encode(kind, number, num_elements)
        write(events[key])
        if is_reduction and of_replicas is not None and compat.reduces_over_replicas(reference()):
            of_replicas.write(events[key])

    def failed(error: Exception) -> None:
        verdict = tracer.error if error is tracer.error else tracer.explain_failure()
        if verdict is not None and verdict is not error:
            raise verdict from error

    return compat.watch_collectives(group, before=event, failed=failed, waiting=tracer.raise_error)


def _watch_steps(tracers: list[CollectiveTracer], groups: list[Any]) -> Callable[[], None]:
    """Count the optimizer steps of this model, and keep mixed-up gradients out of them; returns what stops it."""

    def before() -> None:
        for tracer in tracers:
            tracer.before_step()

    def after() -> None:
        for tracer in tracers:
            tracer.next_step()

    return around_steps(groups, before, after)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
