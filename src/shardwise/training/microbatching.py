"""Split a batch into micro-batches, and halve them on all ranks after out-of-memory."""

from __future__ import annotations

import atexit
import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import compat
from shardwise.diagnosing.guard import catch_up
from shardwise.errors import ConfigError, TrainingError
from shardwise.sharding.registry import recover, sharded_state


@dataclass(frozen=True, slots=True)
class StepCollective:
    """What all ranks must do at the same place. Plain values only: it travels as JSON."""

    kind: str
    """`gather`, `reduce`, `sum` (over the whole mesh, when backward ends) or `meet` (the end of the step)."""
    group: int = -1
    """Of FSDP2's groups, in the model's order."""
    num_elements: int = 0
    """Sent by each rank."""
    dtype: str = ""
    option: bool = False
    """Of `gather`: among fewer ranks, after forward; of `reduce`: then over replicas."""

    def join(self, groups: Sequence[Any], mesh: DeviceMesh | None) -> None:
        """Take part with zeros, and forget what comes.

        Args:
            groups: FSDP2's, in the model's order.
            mesh: The model's, where `shard` sharded it.

        Ranks:
            Collective, with ranks that run the step itself.
        """
        dtype = getattr(torch, self.dtype)
        if self.kind == "gather":
            compat.join_gather(groups[self.group], self.num_elements, dtype, among_fewer=self.option)
        elif self.kind == "reduce":
            compat.join_reduction(groups[self.group], self.num_elements, dtype, over_replicas=self.option)
        elif mesh is not None:
            zeros = torch.zeros(self.num_elements, dtype=dtype, device=mesh.device_type)
            for axis in range(mesh.ndim):
                dist.all_reduce(zeros, group=mesh.get_group(axis))


def dtype_name(tensor: torch.Tensor) -> str:
    """`float32` for `torch.float32`."""
    return str(tensor.dtype).removeprefix("torch.")


_LOOK_S = 0.25
_RETREAT_LOOK_S = 0.01
_MEETING_TIMEOUT = timedelta(hours=2)  # for the slowest rank's step; a dead rank is noticed at once


class Retreating(Exception):
    """Ends the step of a rank that did not fail: all ranks have stopped after the same collective."""


class Retreat:
    """Watches the collectives of a model's steps, so that all ranks can leave one together.

    Args:
        model: Sharded.
        patience_s: How long ranks may take to stop together, before the failed one gives up.

    Ranks:
        The constructor is collective. Between `attempt` and its end there may be no collectives but the model's.
    """

    def __init__(self, model: nn.Module, *, patience_s: float) -> None:
        self._model, self._patience_s = model, patience_s
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self._groups = list(compat.named_groups(model).values())
        self._taps = [compat.CollectiveTap(group, self._listener(index)) for index, group in enumerate(self._groups)]
        self._state = sharded_state(model)
        self._meeting = compat.private_gloo_group("shardwise-retreat", _MEETING_TIMEOUT)
        self._connect = compat.store_connector(f"shardwise-retreat/{_next_number()}")
        self._store = self._connect()
        self._count = 0
        self._log: tuple[int, list[StepCollective]] = (0, [])
        self._retreats = 0
        self._alarmed = -1
        """The retreat that this rank has heard of: there is an alarm as long as it is the one to come."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="shardwise-retreat", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread in the middle of a look must not outlive what it looks at

    def close(self) -> None:
        """Stop watching."""
        atexit.unregister(self.close)
        self._closed.set()
        self._thread.join()

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """The forward and backward passes of one step go inside, and `meet` at their end.

        Raises:
            Retreating: From within, when another rank has failed and all have stopped.

        Ranks:
            Local.
        """
        self._log = (self._count, [])
        for tap in self._taps:
            tap.open()
        if self._state is not None:
            self._state.before_sum.append(self._before_sum)
        try:
            yield
        finally:
            if self._state is not None:
                self._state.before_sum.remove(self._before_sum)
            for tap in reversed(self._taps):
                tap.shut()

    def meet(self) -> None:
        """Wait until every rank has come to the end of the step, or one has failed.

        Only the processes meet; work of an accelerator goes on meanwhile.

        Raises:
            Retreating: One has failed, and all have stopped.

        Ranks:
            Collective.
        """
        self._announce(StepCollective("meet"))
        if self._met_with_failure(False):
            self._alarmed = self._retreats
            self._hold()

    def leave(self, failure: str | None, forget_step: Callable[[], None]) -> dict[int, str]:
        """Leave the step together with all other ranks.

        Args:
            failure: What went wrong on this rank; None where `Retreating` was raised.
            forget_step: Frees what the step holds; called before anything else needs memory.

        Returns:
            What went wrong, by rank; the same on every rank.

        Raises:
            TrainingError: The ranks did not come to stop together.

        Ranks:
            Collective.
        """
        if failure is not None:
            self._store.set(self._key("failure", self._rank), failure)
            self._store.add(self._key("alarm"), 1)
            self._alarmed = self._retreats
            forget_step()
            self._catch_up()
        else:
            forget_step()
        failed = [rank for rank in range(self._num_ranks) if self._store.check([self._key("failure", rank)])]
        failures = {rank: self._store.get(self._key("failure", rank)).decode() for rank in failed}
        self._retreats += 1  # which ends the alarm
        return failures

    def _listener(self, index: int) -> Callable[[bool, torch.Tensor, Any], None]:
        group = self._groups[index]

        def before(is_reduction: bool, sent: torch.Tensor, process_group: Any) -> None:
            if is_reduction:
                option = compat.is_reduced_over_replicas(group)
            else:
                option = compat.gathers_among_fewer(group, process_group)
            kind = "reduce" if is_reduction else "gather"
            self._announce(StepCollective(kind, index, sent.numel(), dtype_name(sent), option))

        return before

    def _before_sum(self, tensor: torch.Tensor) -> None:
        self._announce(StepCollective("sum", num_elements=tensor.numel(), dtype=dtype_name(tensor)))

    def _announce(self, event: StepCollective) -> None:
        """Called before each collective: counts it, or holds this rank back when another has failed."""
        if self._alarmed == self._retreats:
            self._hold()
        self._log[1].append(event)
        self._count += 1

    def _hold(self) -> None:
        """Return if another rank has started the next collective; else wait until all have stopped, and raise."""
        deadline = time.monotonic() + self._patience_s
        while self._count >= self._furthest()[0]:
            if self._all_have_stopped():
                raise Retreating
            self._wait(deadline)

    def _catch_up(self) -> None:
        """Join what the others have started, until all have stopped after the same collective."""
        deadline = time.monotonic() + self._patience_s
        num_unseen = 0
        while True:
            furthest, rank = self._furthest()
            if self._count < furthest:
                base, events = json.loads(self._store.get(self._key("events", rank)))
                for packed in events[self._count - base : furthest - base]:
                    event = StepCollective(*packed)
                    self._count += 1
                    num_unseen += event.kind in ("gather", "reduce")
                    self._join(event)
            elif self._all_have_stopped():
                break
            else:
                self._wait(deadline)
        catch_up(self._model, num_unseen)

    def _join(self, event: StepCollective) -> None:
        if event.kind == "meet":
            self._met_with_failure(True)
        else:
            event.join(self._groups, None if self._state is None else self._state.mesh)

    def _met_with_failure(self, failed: bool) -> bool:
        flag = torch.tensor([int(failed)])
        compat.largest_on(self._meeting, flag)
        return bool(flag)

    def _furthest(self) -> tuple[int, int]:
        """How many collectives any rank is known to have started, and which rank."""
        return max((self._store.add(self._key("count", rank), 0), rank) for rank in range(self._num_ranks))

    def _all_have_stopped(self) -> bool:
        """Say that this rank has stopped, and see whether all have, after the same collective.

        Where they have, none can go on any more: only a rank that has not stopped can be further than this one.
        """
        own = self._key("stopped", self._rank)
        if (missing := self._count + 1 - self._store.add(own, 0)) > 0:
            self._store.add(own, missing)
        if self._store.check([self._key("given up")]):
            self._give_up()
        keys = [self._key("stopped", rank) for rank in range(self._num_ranks)]
        return all(self._store.add(key, 0) == self._count + 1 for key in keys)

    def _wait(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            self._give_up()
        time.sleep(_RETREAT_LOOK_S)

    def _give_up(self) -> NoReturn:
        self._store.set(self._key("given up"), "")
        raise TrainingError(
            f"a rank ran out of memory, and the others did not stop with it within {self._patience_s:.0f} s",
            where=f"rank {self._rank}",
            why="they are in a collective that is not the sharded model's own, or dead",
            fix="set training.micro_batch_size lower",
        )

    def _key(self, what: str, rank: int = 0) -> str:
        return f"{self._retreats}/{what}/{rank}"

    def _watch(self) -> None:
        """The thread: looks for an alarm, and then tells the others how far this rank is, which may be stuck."""
        told: dict[str, int] = {}
        try:
            store = self._connect()
            while not self._closed.wait(_RETREAT_LOOK_S if self._alarmed == self._retreats else _LOOK_S):
                coming = self._retreats
                if self._alarmed < coming and store.check([self._key("alarm")]):
                    self._alarmed = max(self._alarmed, coming)
                if self._alarmed == self._retreats:
                    self._tell(store, told)
        except RuntimeError:  # the store went away, with the rank that kept it: there is nobody left to retreat with
            return

    def _tell(self, store: Any, told: dict[str, int]) -> None:
        (base, events), key = self._log, self._key("count", self._rank)
        count = base + len(events)  # what is in the list has been, or is being, started
        if count > told.get(key, 0):
            store.set(self._key("events", self._rank), json.dumps([base, [list(astuple(event)) for event in events]]))
            store.add(key, count - told.get(key, 0))
            told.clear()
            told[key] = count


_numbers = 0


def _next_number() -> int:
    """The same on every rank, as constructors are collective."""
    global _numbers
    _numbers += 1
    return _numbers


Batch = dict[str, Tensor]
T = TypeVar("T")


class Microbatches:
    """Cuts a rank's batch into parts, and finds out how large they may be.

    It does so where all collectives of a step are known: those of FSDP2 and of `shard`. With tensor parallelism, or
    where parameters are replicated only, running out of memory is an error like any other. Use it as a context, or
    `close` it.

    Args:
        model: Sharded or not.
        rows: Of this rank's batch; the same on every rank.
        size: Rows of a part. None: begin with all of them, and halve that on all ranks whenever one runs out of memory.
        report: Hears, on rank 0, when that happens.
        patience_s: How long ranks may take to leave a step together, before a rank that ran out of memory gives up.

    Raises:
        ConfigError: `size` is less than 1.

    Ranks:
        The constructor, `run` and `close` are collective.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: int,
        size: int | None = None,
        *,
        report: Callable[[str], None] | None = None,
        patience_s: float = 300.0,
    ) -> None:
        if size is not None and size < 1:
            raise ConfigError(
                f"training.micro_batch_size is {size}",
                where="training.micro_batch_size",
                why="a rank runs at least one sequence at once",
                fix="set it to 1 or more, or null to find it out",
            )
        self.size = max(1, min(rows, size or rows))
        """Rows of a part, now."""
        self.num_halvings = 0
        self._model, self._report = model, report or _print
        self._retreat = Retreat(model, patience_s=patience_s) if size is None and _can_retreat(model) else None
        self._can_halve = size is None and (self._retreat is not None or not _is_distributed())

    def __enter__(self) -> Microbatches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread that listens to the other ranks."""
        if self._retreat is not None:
            self._retreat.close()

    def split(self, batch: Batch) -> list[Batch]:
        """The batch in parts of `size` rows, the last one with what is left.

        Ranks:
            Local. All ranks have the same number of parts, as they have the same number of rows.
        """
        cut = {name: tensor.split(self.size) for name, tensor in batch.items()}
        return [dict(zip(cut, parts, strict=True)) for parts in zip(*cut.values(), strict=True)]

    def run(self, work: Callable[[list[Batch]], T], batch: Batch) -> T:
        """Run forward and backward over the parts of a batch; if any rank runs out of memory, again with smaller parts.

        What a failed attempt did is undone on every rank: gradients are dropped, random numbers put back. Buffers that
        a forward changes, as those of batch norm, keep the change.

        Args:
            work: Runs forward and backward for all parts, and calls no other collectives. No gradients may wait from
                before it.
            batch: Of this rank.

        Returns:
            What `work` returned.

        Raises:
            TrainingError: A single row does not fit. The same on every rank.

        Ranks:
            Collective. Costs one meeting of the processes, while accelerators go on working.
        """
        while True:
            random = _random_state()
            try:
                if self._retreat is None:
                    return work(self.split(batch))
                with self._retreat.attempt():
                    result = work(self.split(batch))
                    self._retreat.meet()
                    return result
            except Retreating:
                failure = None
            except Exception as error:
                if not (self._can_halve and is_out_of_memory(error)):
                    raise
                failure = str(error)
            # Only here is the failed attempt's last reference gone, which the exception held.
            failures = self._leave(failure)
            self._halve(failures)
            _set_random_state(random)

    def _leave(self, failure: str | None) -> dict[int, str]:
        if self._retreat is None:
            _forget(self._model)
            return {0: failure or ""}
        return self._retreat.leave(failure, lambda: _forget(self._model))

    def _halve(self, failures: dict[int, str]) -> None:
        ranks = ", ".join(map(str, failures))
        if self.size == 1:
            rank, text = next(iter(failures.items()))
            raise TrainingError(
                f"rank {rank} ran out of memory with a single sequence: {text}",
                where="training.micro_batch_size",
                why="the micro-batch has been halved down to one row, and that is the least",
                fix="set shard.activations = full or a shorter data.sequence_length, or use more ranks",
            )
        before, self.size = self.size, -(-self.size // 2)
        self.num_halvings += 1
        if not _is_distributed() or dist.get_rank() == 0:
            self._report(
                f"out of memory on rank {ranks}: micro-batches of {self.size} rows from now on, not {before}. "
                f"Set training.micro_batch_size = {self.size} to start with that."
            )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory, of an accelerator or of the machine, did not suffice."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _can_retreat(model: nn.Module) -> bool:
    """Whether every collective of a step is one of FSDP2's, or of ours at its end."""
    if not _is_distributed():
        return False
    groups = compat.param_groups(model)
    return bool(groups) and all(compat.num_shards(group) > 1 and compat.is_data_parallel(group) for group in groups)


def _is_distributed() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _forget(model: nn.Module) -> None:
    recover(model)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _random_state() -> list[tuple[torch.Generator, Tensor]]:
    generators = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return [(generator, generator.get_state()) for generator in generators]


def _set_random_state(states: list[tuple[torch.Generator, Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
