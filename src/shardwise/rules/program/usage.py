"""A trace seen by its models: which are sharded when, by whom they are optimized, and where they are entered."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from shardwise.rules.names import FULLY_SHARD
from shardwise.rules.program import facts
from shardwise.rules.program.events import Event, Guard, Trace, exclude_each_other
from shardwise.rules.program.values import Items, Part, Row, Thing, Value, Values, owners_of_params

Module = Thing | Part
_OPTIMIZERS = re.compile(r"optim|adam|sgd|lion|muon|shampoo|adafactor|adagrad|rmsprop|lamb$|soap", re.IGNORECASE)
_NOT_OPTIMIZERS = re.compile(r"zero_grad|clip|step|sched|state|log|print|wrap|offload", re.IGNORECASE)
_IS_SHARDED = re.compile(r"isinstance\(.*\b(FSDPModule|DTensor)\b")
_BUILDS_OPTIMIZER = re.compile(r"(build|make|create|get|configure|set_?up|init)\w*optim", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Shard:
    """One module being sharded."""

    event: Event
    subject: Module
    together: frozenset[Value]
    """All modules of the same call: `fully_shard([a, b])` makes one group."""

    @property
    def is_automatic(self) -> bool:
        """By shardwise, which decides the groups itself."""
        return not self.event.is_call_to(FULLY_SHARD)


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer being built over the parameters of modules."""

    event: Event
    owners: frozenset[Module]


def modules(values: Values) -> list[Module]:
    """Those of the values that can be modules."""
    return [value for value in values if isinstance(value, Thing | Part)]


class Usage:
    """What happens to the models of one trace.

    Args:
        trace: Events in order, of one run of the program.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.events = trace.events

    @cached_property
    def shards(self) -> list[Shard]:
        """Every module that is sharded, in order."""
        names = {FULLY_SHARD, *facts.SHARDWISE_SHARD}
        return [shard for event in self.trace.calls_to(*names) for shard in _shards_of(event)]

    @cached_property
    def optimizers(self) -> list[Optimizer]:
        """Every optimizer that is built on known modules, in order."""
        return [found for event in self.events if (found := _optimizer_of(event)) is not None]

    @cached_property
    def entered(self) -> list[tuple[Event, Module]]:
        """Every call of an object itself, `model(x)`, in order."""
        return [
            (event, module)
            for event in self.events
            if isinstance(event.node, ast.Call) and not event.origins
            for module in self._called(event)
        ]

    @cached_property
    def forwards(self) -> list[tuple[Event, Module]]:
        """Those, and every call of `forward`, which runs no hooks; not in order."""
        directly = [event for event in self.events if event.method == "forward" and not event.is_store]
        return self.entered + [(event, module) for event in directly for module in modules(event.receiver)]

    def _called(self, event: Event) -> Iterator[Module]:
        function = event.node.func if isinstance(event.node, ast.Call) else None
        if isinstance(function, ast.Name | ast.Attribute | ast.Subscript):
            yield from modules(event.called)

    def is_sharded(self, value: Value, at: Event) -> bool:
        """Whether this very module has been sharded when `at` happens."""
        return any(shard.subject == value and self.follows(at, shard.event) for shard in self.shards)

    def is_sharded_by_hand(self, value: Value, at: Event) -> bool:
        """By `fully_shard` itself; shardwise takes care of ways in, `.data` and parameters that stay gathered."""
        mine = [shard for shard in self.shards if shard.subject == value and self.follows(at, shard.event)]
        return bool(mine) and not any(shard.is_automatic for shard in mine)

    def is_gathered_by_hand(self, value: Value, at: Event) -> bool:
        """Whether `value.unshard()` was called before, and so its parameters are there without hooks."""
        return any(
            event.method == "unshard" and value in event.receiver and self.trace.precedes(event, at)
            for event in self.events
        )

    def holds_shards(self, value: Value, at: Event) -> Shard | None:
        """The sharding of this module, of one inside it or of one around it, that precedes `at`."""
        for shard in self.shards:
            if self.follows(at, shard.event) and self.trace.are_related(shard.subject, value):
                return shard
        return None

    def follows(self, later: Event, earlier: Event) -> bool:
        """Whether `later` happens after a sharding; methods of a class, other than its first, may run in any order."""
        if any(_denies_sharding(guard) for guard in later.guards):
            return False
        if later.root is not earlier.root:
            return getattr(later.root, "name", "") != "__init__"
        return earlier.order < later.order and not exclude_each_other(earlier, later)


def _denies_sharding(guard: Guard) -> bool:
    """The other branch of `isinstance(model, FSDPModule)`."""
    return not guard.taken and _IS_SHARDED.search(guard.key) is not None


def _shards_of(event: Event) -> Iterator[Shard]:
    given = event.argument(0, "module") or event.argument(0, "model")
    together = frozenset(_flatten(given))
    for subject in together:
        if isinstance(subject, Thing | Part):
            yield Shard(event, subject, together)


def _flatten(values: Values) -> Iterator[Value]:
    for value in values:
        if isinstance(value, Row):
            for item in value.items:
                yield from item
        elif isinstance(value, Items):
            yield from value.element
        else:
            yield value


def _optimizer_of(event: Event) -> Optimizer | None:
    if event.is_store or event.is_inlined:
        return None
    names = [origin.rpartition(".")[2] for origin in event.origins] or [event.method]
    given = [*event.args, *(argument.values for argument in event.keywords.values())]
    everything = frozenset().union(*given)
    if any(_OPTIMIZERS.search(name) and not _NOT_OPTIMIZERS.search(name) for name in names):
        owners = owners_of_params(everything)
        if not owners and any(map(_BUILDS_OPTIMIZER.match, names)):
            owners = set(modules(event.argument(0, "model")))
        if owners:
            return Optimizer(event, frozenset(owners))
    return None
