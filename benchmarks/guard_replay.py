"""What `guard` adds on the training thread, without the step: its wrappers around collectives that do nothing."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.measuring import median
from shardwise.distributed.collective_trace import (
    CollectiveKind,
    GroupNames,
    RankTrace,
    create_shared_trace,
    group_by_machine,
    group_of,
    is_step,
    kind_of,
    open_shared_trace,
)
from shardwise.distributed.tracer import CollectiveTracer
from shardwise.sharding.hooks.watching import watch_group

Event = tuple[CollectiveKind, int]
_ROUNDS = 200


class _Collective:
    """Stands for FSDP2's call of a collective; takes what that takes."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
        return None


class _Group:
    """Stands for an FSDP2 group as far as the guard looks at it."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._all_gather_comm, self._reduce_scatter_comm = _Collective(), _Collective()
        self._sent = torch.empty(16, device="meta")

    def unshard(self, async_op: bool = False) -> None:
        self._all_gather_comm(output_tensor=self._sent, input_tensor=self._sent, group=None, async_op=async_op)

    def reduce(self) -> None:
        self._reduce_scatter_comm(output_tensor=self._sent, input_tensor=self._sent, group=None)


def last_events(trace: RankTrace, num_events: int) -> list[Event]:
    """Kind and group of a rank's last events."""
    events = [trace.event(index) for index in range(trace.count - num_events, trace.count)]
    return [(kind_of(event), group_of(event)) for event in events if event is not None and not is_step(event)]


def replay(events: Sequence[Event], num_ranks: int, device: str) -> float:
    """Seconds that the guard adds to a step of these events, where the neighbours have come to all of them before.

    Ranks:
        Local.
    """
    names = tuple(f"group {number}" for number in range(1 + max(group for _, group in events)))
    plain, watched = ([_Group(device) for _ in names] for _ in range(2))
    path = create_shared_trace(num_ranks)
    traces = open_shared_trace(path, num_ranks)
    path.unlink()
    machines = group_by_machine(["here"] * num_ranks, 0)
    tracer = CollectiveTracer(0, GroupNames(names), range(num_ranks), patience=60.0, report=print)
    tracer.open(traces, machines)
    step = tracer.groups.add_step([(number, 0) for number in range(len(names))])
    undo = [watch_group(group, tracer, number) for number, group in enumerate(watched)]
    for trace in traces:
        trace.open()
    _time(watched, events)
    written = [event for index in range(len(events)) if (event := tracer.trace.event(index)) is not None]
    others = [trace.writer([]) for trace in traces[1:]]
    _write_all(others, written)
    written.append(step)
    extra = []
    for _ in range(_ROUNDS):
        _write_all(others, written)
        base = _time(plain, events)
        extra.append(_time(watched, events, lambda: tracer.before_step(step)) - base)
    for stop in undo:
        stop()
    return median(extra)


def _write_all(writers: Sequence[Callable[[int], bool]], events: Sequence[int]) -> None:
    for write in writers:
        for event in events:
            write(event)


def _time(groups: Sequence[_Group], events: Sequence[Event], before_step: Callable[[], None] | None = None) -> float:
    start = time.perf_counter()
    for kind, number in events:
        if kind is CollectiveKind.REDUCE_SCATTER:
            groups[number].reduce()
        else:
            groups[number].unshard()
    if before_step is not None:
        before_step()
    return time.perf_counter() - start
