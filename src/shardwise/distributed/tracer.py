"""Compare traces before each collective, and report the rank that differs."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.distributed.collective_trace import (
    HISTORY,
    CollectiveKind,
    GroupNames,
    Machines,
    RankTrace,
    StoreExchange,
    group_of,
    is_step,
    kind_of,
)
from shardwise.errors import ShardError

LOOK_SECONDS = 0.25
_TROUBLE_SECONDS = 0.1
_STACK_SECONDS = 0.5  # a rank without progress for this time publishes its stack
_DEAD_SECONDS = 1.0
_STUCK_SECONDS = 2.0
_ANSWER_SECONDS = 2.0
_CLOSE_SECONDS = 3.0
_EXPLAIN_SECONDS = 5.0
_SILENT_SECONDS = 3.5
_MAX_STACKS = 8
_MAX_FRAMES = 6
_MAX_TEXT = 1500  # five of them, escaped, fit into a trace
_STEP_SECONDS = 5.0
_POLL_SECONDS = 2e-5
_MAX_MISSED = 3  # steps with a late rank, after which waiting stops


def stack_of(thread: int) -> str:
    """Return the stack of a thread: the user's own frames, innermost last."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    frames = traceback.extract_stack(frame)
    own = [entry for entry in frames if "/torch/" not in entry.filename and "/shardwise/" not in entry.filename]
    return "".join(traceback.format_list((own or frames)[-_MAX_FRAMES:]))


_WHY = (
    "every all-gather and reduce-scatter is a collective of all ranks; ranks that run different modules wait for each "
    "other for ever, or mix up each other's parameters and gradients"
)


@dataclass(frozen=True, slots=True)
class TraceDifference:
    """Ranks with different collectives at the same index."""

    error: ShardError
    odd: tuple[int, ...]
    """The ranks that differ from the majority."""


class PeerView:
    """Read-only view of the traces of all ranks from one rank.

    Args:
        traces: The traces of all ranks.
        rank: Index of this rank's trace.
        groups: Names of the groups in events.
        global_ranks: Ranks as numbered in messages; default: indices of the traces.
    """

    def __init__(
        self, traces: Sequence[RankTrace], rank: int, groups: GroupNames, global_ranks: Sequence[int] | None = None
    ) -> None:
        self.traces, self.rank, self._groups = traces, rank, groups
        self.global_ranks = global_ranks or range(len(traces))
        self.own = traces[rank]
        self._steps: deque[tuple[int, int]] = deque([(0, 1)], maxlen=HISTORY)
        self._compared = [0] * len(self.traces)

    def note_step(self) -> None:
        """Record the first event of this rank's step."""
        self._steps.append((self.own.count, self.own.step))

    def first_difference(self, ranks: Sequence[int] | None = None) -> int | None:
        """Return the first index at which a newly arrived event of another rank differs."""
        end_of_own = self.own.count
        found: list[int] = []
        for rank in range(len(self.traces)) if ranks is None else ranks:
            trace = self.traces[rank]
            end = min(end_of_own, trace.count)
            start = max(self._compared[rank], end - HISTORY, trace.first)
            if start < end:
                if self.own.events(start, end) != trace.events(start, end):
                    differing = (i for i in range(start, end) if self.own.event(i) != trace.event(i))
                    found.append(next(differing, end))
                else:
                    self._compared[rank] = end
        first = min(found, default=end_of_own)
        return first if first < end_of_own else None

    def difference_at(self, index: int) -> TraceDifference | None:
        """Return the events at an index, if they differ."""
        ranks_at: dict[int, list[int]] = {}
        for rank, trace in enumerate(self.traces):
            if (event := trace.event(index)) is not None:
                ranks_at.setdefault(event, []).append(rank)
        if len(ranks_at) < 2:
            return None
        usual = max(ranks_at.values(), key=len)
        odd = sorted(rank for ranks in ranks_at.values() if ranks is not usual for rank in ranks)
        step = next((step for count, step in reversed(list(self._steps)) if count <= index), self._steps[0][1])
        rows = [f"{self._numbers(ranks)}: {self._groups.in_words(event)}" for event, ranks in ranks_at.items()]
        what, fix = self._sentence(ranks_at, odd, step), self._fix(ranks_at)
        return TraceDifference(ShardError(what, where="; ".join(rows), why=_WHY, fix=fix), tuple(odd))

    def difference(self) -> TraceDifference | None:
        """Return the events at the first index where newly arrived events differ."""
        index = self.first_difference()
        return None if index is None else self.difference_at(index)

    def _sentence(self, ranks_at: dict[int, list[int]], odd: list[int], step: int) -> str:
        """Describe the difference, without naming a culprit: the events do not show which rank is wrong."""
        kinds = {kind_of(event) for event in ranks_at}
        if not any(map(is_step, ranks_at)) and len({group_of(event) for event in ranks_at}) == 1:
            if len(kinds) == 1:
                name = self._groups.full_name(next(iter(ranks_at)))
                return f"{self._numbers(odd)} reduced gradients of {name} of other shapes than the rest at step {step}"
            if CollectiveKind.ALL_GATHER_EVALUATION in kinds:
                return f"{self._numbers(odd)} ended an evaluation, or began one, without the others at step {step}"
        places = (f"{self._numbers(ranks)} {self._groups.place_of(event)}" for event, ranks in ranks_at.items())
        return f"ranks diverge at step {step}: {', '.join(places)}"

    def _fix(self, ranks_at: dict[int, list[int]]) -> str:
        """Return the fix for the difference."""
        collectives = [event for event in ranks_at if not is_step(event)]
        kinds = {kind_of(event) for event in collectives}
        is_forward = len(collectives) == len(ranks_at) and kinds <= {
            CollectiveKind.ALL_GATHER_FORWARD,
            CollectiveKind.ALL_GATHER_EVALUATION,
        }
        if len({self._groups.model(event) for event in collectives}) > 1:
            return "run and step each model on every rank, and in the same order"
        names = [self._groups.name(event) for event in collectives]
        if is_forward and len(set(names)) > 1 and (towers := _towers(names)):
            skipped = " or ".join(f"shardwise.guard(model, repair=['{tower}'])" for tower in towers)
            return (
                f"run the same modules on every rank. For a tower that some ranks have no inputs for: {skipped}, after "
                "sharding, on every rank; or run it there on dummy inputs and add 0 * output.sum() to the loss"
            )
        if len(collectives) < len(ranks_at) and CollectiveKind.REDUCE_SCATTER not in kinds:
            return "step an optimizer on all ranks or on none: let all ranks know first what one finds (NaN, no data)"
        if is_forward:
            return "call the model equally often on every rank: `lockstep(loader)` where loaders differ in length"
        return (
            "use the same parameters on every rank. For parameters that only some ranks use (experts, towers): "
            "shardwise.guard(model, repair=['NAME OF THE TOWER']), after sharding, on every rank; repair=[] where only "
            "parameters within modules differ; `lockstep(loader)` where loaders differ in length"
        )

    def _numbers(self, ranks: Sequence[int]) -> str:
        numbers = [str(self.global_ranks[rank]) for rank in ranks]
        return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"

    def verdict_of_others(self) -> ShardError | None:
        """Return the error that another rank found."""
        found = ((rank, trace.verdict) for rank, trace in enumerate(self.traces) if rank != self.rank)
        read = (from_text(text, self.global_ranks[rank]) for rank, text in found if text)
        return next((verdict[0] for verdict in read if verdict is not None), None)

    def note_stack(self, error: BaseException, rank: int) -> None:
        """Add the stack of a rank to an error."""
        trace = self.traces[rank]
        verdict = trace.verdict
        found = None if verdict is None else from_text(verdict, rank)
        stack = trace.text if verdict is None else found[1] if found else ""
        note = f"rank {self.global_ranks[rank]} is here:\n{stack}"
        if stack and note not in getattr(error, "__notes__", []):
            error.add_note(note)

    def note_stacks_of_finders(self, error: ShardError) -> None:
        """Add the stacks of ranks that found an error themselves."""
        for rank, trace in enumerate(self.traces):
            if rank != self.rank and trace.verdict is not None:
                self.note_stack(error, rank)

    def missing(self) -> int | None:
        """Return a rank that will not reach this event, because it is dead or has left the loop."""
        return self._first_rank(lambda trace: trace.has_left and trace.count < self.own.count)

    def dead(self) -> int | None:
        """Return a rank that is dead, or on an unreachable machine."""
        return self._first_rank(
            lambda trace: not trace.is_alive or (not trace.has_ended and trace.seconds_unheard > _SILENT_SECONDS)
        )

    def late(self, patience: float) -> int | None:
        """Return a rank that has not reached this event and made no progress for `patience` seconds."""
        return self._first_rank(lambda trace: trace.count < self.own.count and trace.seconds_still > patience)

    def _first_rank(self, condition: Callable[[RankTrace], bool]) -> int | None:
        return next((rank for rank, trace in enumerate(self.traces) if condition(trace)), None)

    def absence_of(self, absent: int) -> ShardError:
        """Return the error for a rank that is missing in this rank's collective."""
        missing, name, here = self.traces[absent], self.global_ranks[absent], self.global_ranks[self.rank]
        doing, last = self._last_event(self.rank), self._last_event(absent)
        waits = f"rank {here} {f'is in the {doing}' if doing else 'waits'}"
        reached = f"last on rank {name}: {last}" if last else f"nothing yet on rank {name}"
        where = f"{waits} in step {self.own.step}; {reached}"
        if not missing.is_alive:
            what = f"rank {name} died in step {missing.step}"
            where = f"{waits} and waits for it; {reached}"
            why = "its process is gone: killed (out of memory?), crashed, or ended by an error of its own"
            fix = f"read the log of rank {name}; `dmesg` says whether the system killed it"
        elif missing.has_ended:
            what = (
                f"rank {name} has left the training loop after {max(missing.step - 1, 0)} steps; rank {here} continues"
            )
            where = f"{waits} in step {self.own.step}"
            why = "its data ended earlier, or it broke out of the loop alone"
            fix = "for batch in shardwise.lockstep(loader): ... stops all ranks together"
        elif missing.seconds_unheard > _SILENT_SECONDS:
            what = f"rank {name} died in step {missing.step}, or its machine cannot be reached"
            where = f"{waits} and waits for it; {reached}"
            why = f"nothing has been heard from its machine for {missing.seconds_unheard:.0f} s"
            fix = f"read the log of rank {name}; see whether its machine still runs, and its network"
        else:
            what = f"rank {name} has made no progress for {missing.seconds_still:.0f} s; rank {here} waits for it"
            why = "it is busy with something else (loading data, saving, evaluating), or hangs"
            fix = "see where it is, below"
        return ShardError(what, where=where, why=why, fix=fix)

    def _last_event(self, rank: int) -> str:
        trace = self.traces[rank]
        event = trace.event(trace.count - 1) if trace.count else None
        return self._groups.in_words(event) if event is not None else ""

    def cause_of_failure(self) -> ShardError | None:
        """Return the rank that caused a failed collective, if any."""
        if (difference := self.difference()) is not None:
            return difference.error
        if (verdict := self.verdict_of_others()) is not None:
            return verdict
        culprit = self.missing()
        culprit = self.dead() if culprit is None else culprit
        return None if culprit is None else self.absence_of(culprit)


def _towers(groups: Sequence[str]) -> list[str]:
    """Return for each group the outermost module that contains none of the other groups."""
    paths = [tuple(name.partition(" [")[0].split(".")) for name in groups]
    found = {}
    for path in paths:
        others = {other[:n] for other in paths if other != path for n in range(1, len(other) + 1)}
        length = next((n for n in range(1, len(path)) if path[:n] not in others), len(path))
        found[path[:length]] = None
    return [".".join(path) for path in found if path != ("(root)",)]


def to_text(error: ShardError, stack: str) -> str:
    """Serialize an error and its stack for the trace."""
    parts = [error.what, error.where, error.why, error.fix, stack[-_MAX_TEXT:]]
    return json.dumps([part[:_MAX_TEXT] for part in parts])


def from_text(text: str, rank: int) -> tuple[ShardError, str] | None:
    """Parse the error and stack in the trace of `rank`; None if incomplete."""
    try:
        what, where, why, fix, stack = json.loads(text)
    except ValueError:
        return None
    error = ShardError(what, where=where, why=why, fix=fix)
    error.add_note(f"(found by rank {rank})")
    return error, stack


class CollectiveTracer:
    """Writes this rank's events, compares them with other ranks, and raises or reports differences.

    One tracer is used for all models with the same ranks, because their collectives must have the same order.

    Args:
        rank: Index of this rank's trace.
        groups: Names of the groups in events.
        global_ranks: Ranks as numbered in messages.
        patience: Seconds without progress after which late ranks are reported.
        report: Called with a message about ranks that are late or diverge.
    """

    def __init__(
        self,
        rank: int,
        groups: GroupNames,
        global_ranks: Sequence[int],
        *,
        patience: float,
        report: Callable[[str], None],
    ) -> None:
        self.groups, self.patience, self.report = groups, patience, report
        self.aborters: list[Callable[[], None]] = []
        """Called from the tracer's thread when the training thread is stuck after an error."""
        self.siblings: list[CollectiveTracer] = []
        """Tracers of this rank's other process groups, which also publish the errors of this one."""
        self.publishes_events = False
        """Publish each event before its collective starts: if buffer sizes differ between ranks, gloo ends the
        process before the thread could publish the event."""
        self.num_opened, self.is_closed = 0, True
        self.machine: str | None = None
        self._rank, self._global_ranks = rank, global_ranks

    def open(
        self,
        traces: Sequence[RankTrace],
        machines: Machines,
        exchange: StoreExchange | None = None,
        machine: str | None = None,
    ) -> None:
        """Open new traces, on all ranks.

        Args:
            traces: The traces of all ranks.
            machines: The ranks of each machine.
            exchange: The exchange with other machines, if any.
            machine: The user's name for this machine.
        """
        if not self.is_closed:
            self._end()
        self.num_opened += 1
        self.machine = machine
        self.trace = traces[self._rank]
        self.error: ShardError | None = None
        """The error of this rank, raised by the next event."""
        self.found_at_end: ShardError | None = None
        """A difference that was found only when the guard was closed."""
        self.is_closed = self.is_paused = False
        self._view = PeerView(traces, self._rank, self.groups, self._global_ranks)
        self._machines, self._exchange, self._pid = machines, exchange, os.getpid()
        self._num_missed = self._num_steps = self._digest = self._digested_to = 0
        self._write = self.trace.writer([traces[other] for other in _neighbors(machines, self._rank)])
        self._training_thread = threading.get_ident()
        self._was_raised = False
        """Whether the error was raised in the training thread."""
        self._moved_to, self._reported_at, self._suspected_at = 0, -1, -1
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwise-guard", daemon=True)

    def start(self) -> None:
        """Start the thread, unless it was started."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Stop tracing, and record that this rank has left."""
        if self.is_closed or os.getpid() != self._pid:  # a forked process is not this rank
            return
        self._end()
        # The last events of other machines may have arrived only now.
        if self._exchange is not None and self.error is None and (difference := self._view.difference()) is not None:
            self.found_at_end = difference.error
            self._say(difference.error)

    def _end(self) -> None:
        self.is_closed = True
        self.trace.has_ended = True
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(None if self._exchange is None else _CLOSE_SECONDS)  # the store may not answer

    def write(self, event: int) -> None:
        """Write an event, and raise if another rank's event at this index differs."""
        if self.is_paused:
            return
        if self.error is not None:
            self.raise_error()
        if self._write(event):
            self._raise_difference(self.trace.count - 1)
        if self._exchange is not None and self.publishes_events:
            self._exchange.publish()

    def before_step(self, event: int) -> None:
        """Raise unless all ranks reached this optimizer step by the same collectives.

        Waits for ranks of this machine, at most `_STEP_SECONDS`: they may skip the step for a reason.

        Args:
            event: The optimizer step.
        """
        if self.is_paused or self.is_closed:
            return
        self.write(event)
        # With the fake backend the other ranks do not exist: their traces have no process.
        others = [rank for rank in self._machines.local if rank != self._view.rank and self._view.traces[rank].pid]
        self._wait_at_step(lambda: all(self._view.traces[rank].count >= self.trace.count for rank in others))
        if (index := self._view.first_difference(others)) is not None:
            self._raise_difference(index)
        if self._exchange is not None:
            self._agree_with_machines(self._exchange)

    def _wait_at_step(self, is_reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _STEP_SECONDS
        while self._num_missed < _MAX_MISSED and not is_reached():
            if self.error is not None:
                self.raise_error()
            if time.monotonic() > deadline or self._view.missing() is not None:
                self._num_missed += 1
                return
            time.sleep(_POLL_SECONDS)

    def _agree_with_machines(self, exchange: StoreExchange) -> None:
        """Raise if ranks of other machines had different collectives before this step, as far as known in time."""
        self._num_steps += 1
        first = self._view.traces[self._machines.local[0]]
        if exchange.steps is None:
            self._wait_at_step(lambda: first.agreed_steps >= self._num_steps or first.has_concluded)
            if first.has_concluded and self.error is None and (verdict := self._view.verdict_of_others()) is not None:
                self._conclude(verdict)
            self.raise_error()
            return
        start = max(self._digested_to, self.trace.count - HISTORY)
        self._digest = zlib.crc32(self.trace.events(start, self.trace.count), self._digest)
        self._digested_to = self.trace.count
        if not exchange.steps.is_shared(f"{self.trace.count} {self._digest}", self.raise_error):
            self._raise_what_machines_did(exchange)
        self.trace.agreed_steps = self._num_steps

    def _raise_what_machines_did(self, exchange: StoreExchange) -> None:
        """Wait for the traces of all machines and raise the first difference."""
        self.trace.wants_all = True
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline:
            exchange.exchange(with_all=True)
            if (index := self._view.first_difference()) is not None:
                self._raise_difference(index)
            time.sleep(_TROUBLE_SECONDS)
        error = ShardError(
            f"machines came to the optimizer step of step {self.trace.step} by different collectives",
            why=_WHY,
            fix="run the same modules the same number of times on every rank",
        )
        self._conclude(error)
        self.raise_error()

    def next_step(self) -> None:
        """Record the end of a step."""
        self.trace.step += 1
        self._view.note_step()

    def raise_error(self) -> None:
        """Raise the error that the thread found, if any."""
        if self.error is not None and not self.is_closed:
            self._was_raised = True
            self._view.note_stacks_of_finders(self.error)
            raise self.error

    def explain_failure(self) -> ShardError | None:
        """Return why a collective of this rank failed, if another rank is the cause."""
        deadline = time.monotonic() + (_EXPLAIN_SECONDS if self._exchange is not None else 0)
        self.trace.wants_all = True
        verdict = None
        while not self.is_closed and verdict is None:
            time.sleep(LOOK_SECONDS)  # a process takes time to die, and traces of other machines to arrive
            verdict = self.error or self._view.cause_of_failure()
            if time.monotonic() > deadline:
                break
        if verdict is not None:
            self._was_raised = True
            self._conclude(verdict)
            self._view.note_stacks_of_finders(verdict)
        return verdict

    def _raise_difference(self, index: int) -> None:
        """Raise the difference at an index, or an earlier one if another machine's trace arrived late."""
        first = self._view.first_difference()
        earlier = self._view.difference_at(first) if first is not None and first < index else None
        difference = earlier or self._view.difference_at(index)
        if difference is not None:  # None: the event was overwritten meanwhile
            self._was_raised = True
            difference = self._with_stacks(difference)
            self._conclude(difference.error)
            raise difference.error

    def _with_stacks(self, difference: TraceDifference, *, refresh: bool = False) -> TraceDifference:
        """Return the difference with the stacks of the ranks, starting with those that differ."""
        self.trace.wants_all = True
        ranks = [r for r, trace in enumerate(self._view.traces) if r != self._view.rank and not trace.has_left]
        ranks = sorted(ranks, key=lambda rank: rank not in difference.odd)[:_MAX_STACKS]
        self._wait_for_stacks(ranks, refresh=refresh)
        difference = self._view.difference() or difference  # traces of other machines may have arrived
        self._note_stacks(difference.error, ranks)
        return difference

    def _run(self) -> None:
        """Main function of the thread."""
        try:
            self._watch()
        except Exception:
            self.report(f"shardwise: ranks are no longer compared, for an unexpected error:\n{traceback.format_exc()}")

    def _watch(self) -> None:
        """Read the traces four times per second, more often after an error."""
        while not self._stopped.wait(
            _TROUBLE_SECONDS if self._exchange is not None and self._exchange.in_trouble else LOOK_SECONDS
        ):
            self._refresh()
            if self.error is not None:
                if not self._was_raised and self.trace.seconds_still > _STUCK_SECONDS:
                    self._was_raised = True
                    for abort in self.aborters:
                        abort()
            elif (difference := self._view.difference()) is not None:
                self._handle_difference(difference)
            elif self.trace.count and self.trace.seconds_still > _DEAD_SECONDS:
                self._find_absent()
        if self._exchange is not None:
            self._exchange.exchange()

    def _refresh(self) -> None:
        """Record the training thread's progress or stack, and exchange traces with other machines."""
        if self.trace.count != self._moved_to:
            self._moved_to = self.trace.count
            self.trace.touch()
        elif self.error is None and self.trace.seconds_still > _STACK_SECONDS:
            self.trace.set_text(stack_of(self._training_thread))
        if self._exchange is not None:
            self._exchange.exchange()

    def _handle_difference(self, difference: TraceDifference) -> None:
        self.trace.wants_all = True
        if self.trace.seconds_still >= LOOK_SECONDS:  # otherwise it computes with mixed-up data: stop it at once
            difference = self._with_stacks(difference, refresh=True)
        if self.error is None:
            self._say(difference.error)
            self._conclude(difference.error)

    def _find_absent(self) -> None:
        view, here = self._view, self.trace.count
        is_late, missing = self.trace.seconds_still > self.patience, view.missing()
        found, late, error = view.verdict_of_others(), None, None
        if missing is not None and view.traces[missing].verdict is None:
            error = view.absence_of(missing) if is_late or not view.traces[missing].is_alive else None
        elif found is not None:  # a rank that is missing may have left with an error of its own
            error = found
        elif is_late and self._reported_at != here:
            late = view.late(self.patience)
        if (error is not None or late is not None) and self._suspected_at != here:
            self._suspected_at = here  # report at the next look: the other ranks publish meanwhile
            return
        if late is not None:
            error = view.absence_of(late)
            self._wait_for_stacks([late], refresh=True)
            self._note_stacks(error, [late])
        if error is None or self.trace.count != here or self.error is not None:
            return  # no error, or the awaited rank has arrived
        self._say(error)
        if late is None:
            self._conclude(error)
        else:
            self._reported_at = here  # it may still arrive

    def _wait_for_stacks(self, ranks: Sequence[int], *, refresh: bool = False) -> None:
        """Wait briefly for the stacks of stalled ranks."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline and not all(self._view.traces[rank].is_text_current for rank in ranks):
            time.sleep(_TROUBLE_SECONDS)
            if refresh:
                self._refresh()

    def _note_stacks(self, error: ShardError, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if self._view.traces[rank].is_text_current:
                self._view.note_stack(error, rank)

    def _conclude(self, error: ShardError) -> None:
        """Set the error of this rank, and publish it with the stack."""
        for tracer in (self, *self.siblings):
            if tracer is self or tracer.error is None:
                tracer.error = error
                tracer.trace.set_text(to_text(error, stack_of(self._training_thread)), is_verdict=True)
                if tracer._exchange is not None:
                    tracer._exchange.publish()  # now: the process may end before the thread publishes again

    def _say(self, error: ShardError) -> None:
        self.report("\n".join([str(error), *getattr(error, "__notes__", [])]))


def _neighbors(machines: Machines, rank: int) -> list[int]:
    """Return three ranks of this machine and one of the next: any difference is visible between neighbors."""
    local = machines.local
    place = local.index(rank)
    chosen = {local[0], local[place - 1], local[(place + 1) % len(local)]}
    chosen |= {machines.ranks[(machines.own + 1) % len(machines.ranks)][0]}
    return sorted(chosen - {rank})
