"""What one run of a program does with its models: sharding, optimizers, forwards, and the conditions of each."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cached_property

from shardwise.source import values as v
from shardwise.source.syntax import FULLY_SHARD
from shardwise.source.values import ObjectRef, ProgramEvent, Value, exclude_each_other, modules, owners_of_params

SHARDWISE_SHARD = ("shardwise.shard", "shardwise.prepare_fully_shard")
_OPTIMIZERS = re.compile(r"optim|adam|sgd|lion|muon|shampoo|adafactor|adagrad|rmsprop|lamb$|soap", re.IGNORECASE)
_NOT_OPTIMIZERS = re.compile(r"zero_grad|clip|step|sched|state|log|print|wrap|offload", re.IGNORECASE)
_BUILDS_OPTIMIZER = re.compile(r"(build|make|create|get|configure|set_?up|init)\w*optim", re.IGNORECASE)
_IS_SHARDED = re.compile(r"isinstance\(.*\b(FSDPModule|DTensor)\b|is_sharded\(")


@dataclass(frozen=True, slots=True)
class Shard:
    """One module being sharded."""

    event: ProgramEvent
    subject: ObjectRef
    together: frozenset[Value]
    """All modules of the same call: `fully_shard([a, b])` makes one group."""

    @property
    def is_automatic(self) -> bool:
        """By shardwise, which decides the groups itself."""
        return not self.event.is_call_to(FULLY_SHARD)


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer being built over the parameters of modules."""

    event: ProgramEvent
    owners: frozenset[ObjectRef]


@dataclass(eq=False)
class Trace:
    """The events of one way through a file: its main program, or one function or class that nobody here calls."""

    events: list[ProgramEvent] = field(default_factory=list)
    owners: dict[Value, set[ObjectRef]] = field(default_factory=dict)
    """Whose attribute or item an object became."""

    def calls_to(self, *names: str) -> list[ProgramEvent]:
        """Every call of one of these public names, in order."""
        return [event for event in self.events if event.is_call_to(*names)]

    @cached_property
    def shards(self) -> list[Shard]:
        """Every module that is sharded, in order."""
        found: list[Shard] = []
        for event in self.calls_to(FULLY_SHARD, *SHARDWISE_SHARD):
            together = frozenset(v.nested(event.argument(0, "module", "model"), depth=2))
            found += [Shard(event, subject, together) for subject in modules(together)]
        return found

    @cached_property
    def optimizers(self) -> list[Optimizer]:
        """Every optimizer that is built on known modules, in order."""
        found = [(event, _optimized(event)) for event in self.events if not event.is_store and not event.is_inlined]
        return [Optimizer(event, owners) for event, owners in found if owners]

    @cached_property
    def entered(self) -> list[tuple[ProgramEvent, ObjectRef]]:
        """Every call of an object itself, `model(x)`, in order."""
        return [
            (event, module)
            for event in self.events
            if not event.origins and not isinstance(getattr(event.node, "func", None), ast.Call)
            for module in modules(event.called)
        ]

    @cached_property
    def forwards(self) -> list[tuple[ProgramEvent, ObjectRef]]:
        """Those, and every call of `forward`, which runs no hooks; not in order."""
        directly = [event for event in self.events if event.method == "forward" and not event.is_store]
        return self.entered + [(event, module) for event in directly for module in modules(event.receiver)]

    def precedes(self, one: ProgramEvent, other: ProgramEvent) -> bool:
        """Whether `one` comes before `other` in one and the same run."""
        if one.order >= other.order or exclude_each_other(one, other):
            return False
        return one.root is other.root or getattr(one.root, "name", "") == "__init__"

    def follows(self, later: ProgramEvent, earlier: ProgramEvent) -> bool:
        """Whether `later` happens after a sharding; methods of a class, other than its first, may run in any order."""
        if any(not guard.taken and _IS_SHARDED.search(guard.key) for guard in later.guards):
            return False  # the other branch of `isinstance(model, FSDPModule)`
        if later.root is not earlier.root:
            return getattr(later.root, "name", "") != "__init__"
        return earlier.order < later.order and not exclude_each_other(earlier, later)

    def is_part_of(self, inner: Value, outer: Value) -> bool:
        """Whether `inner` is reached from `outer`, by a path or by having been made its attribute; not itself."""
        return inner != outer and outer in self._around(inner, set())

    def _around(self, value: Value, seen: set[Value]) -> set[Value]:
        if value not in seen:
            seen.add(value)
            if isinstance(value, ObjectRef) and value.path:
                self._around(value.parent, seen)
            for owner in self.owners.get(value, ()):
                self._around(owner, seen)
        return seen

    def are_related(self, a: Value, b: Value) -> bool:
        """Whether they are the same or one is part of the other."""
        return a == b or self.is_part_of(a, b) or self.is_part_of(b, a)

    def _shards_of(self, value: Value, at: ProgramEvent) -> list[Shard]:
        return [shard for shard in self.shards if shard.subject == value and self.follows(at, shard.event)]

    def is_sharded(self, value: Value, at: ProgramEvent) -> bool:
        """Whether this very module has been sharded when `at` happens."""
        return bool(self._shards_of(value, at))

    def is_sharded_by_hand(self, value: Value, at: ProgramEvent) -> bool:
        """By `fully_shard` itself; shardwise takes care of ways in, `.data` and parameters that stay gathered."""
        found = self._shards_of(value, at)
        return bool(found) and not any(shard.is_automatic for shard in found)

    def holds_shards(self, value: Value, at: ProgramEvent) -> Shard | None:
        """The sharding of this module, of one inside it or of one around it, that precedes `at`."""
        related = (shard for shard in self.shards if self.follows(at, shard.event))
        return next((shard for shard in related if self.are_related(shard.subject, value)), None)


def makes_optimizer(name: str) -> bool:
    """Whether a function or class is called as those that make optimizers are."""
    return _OPTIMIZERS.search(name) is not None and not _NOT_OPTIMIZERS.search(name)


def _optimized(event: ProgramEvent) -> frozenset[ObjectRef]:
    """The modules whose parameters an event gives to a new optimizer; none where it makes no optimizer."""
    names = [origin.rpartition(".")[2] for origin in event.origins] or [event.method]
    if not any(map(makes_optimizer, names)):
        return frozenset()
    given = [*event.args, *(entry.values for entry in event.keywords.values())]
    owners = owners_of_params(frozenset().union(*given))
    if not owners and any(map(_BUILDS_OPTIMIZER.match, names)):
        owners = set(modules(event.argument(0, "model")))
    return frozenset(owners)
