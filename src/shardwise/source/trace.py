"""Events of one run of a program: sharding, optimizers, forwards, and the conditions of each."""

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
    """A module that is sharded by a call."""

    event: ProgramEvent
    subject: ObjectRef
    together: frozenset[Value]
    """All modules of the call: `fully_shard([a, b])` makes one group."""

    @property
    def is_automatic(self) -> bool:
        """Whether it is sharded by shardwise, which decides the groups itself."""
        return not self.event.is_call_to(FULLY_SHARD)


@dataclass(frozen=True, slots=True)
class Optimizer:
    """A new optimizer and the modules whose parameters it updates."""

    event: ProgramEvent
    owners: frozenset[ObjectRef]


@dataclass(eq=False)
class Trace:
    """Events from one entry point of a file: the main program, or a function or class that the file never calls."""

    events: list[ProgramEvent] = field(default_factory=list)
    owners: dict[Value, set[ObjectRef]] = field(default_factory=dict)
    """By object, the objects of which it became an attribute or item."""

    def calls_to(self, *names: str) -> list[ProgramEvent]:
        """Return every call of one of these public names, in order."""
        return [event for event in self.events if event.is_call_to(*names)]

    @cached_property
    def shards(self) -> list[Shard]:
        """Every sharded module, in order."""
        found: list[Shard] = []
        for event in self.calls_to(FULLY_SHARD, *SHARDWISE_SHARD):
            together = frozenset(v.nested(event.argument(0, "module", "model"), depth=2))
            found += [Shard(event, subject, together) for subject in modules(together)]
        return found

    @cached_property
    def optimizers(self) -> list[Optimizer]:
        """Every optimizer built from parameters of known modules, in order."""
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
        """Every call in `entered`, followed by every call of `forward`, which runs no hooks."""
        directly = [event for event in self.events if event.method == "forward" and not event.is_store]
        return self.entered + [(event, module) for event in directly for module in modules(event.receiver)]

    def precedes(self, one: ProgramEvent, other: ProgramEvent) -> bool:
        """Whether `one` happens before `other` in the same run."""
        if one.order >= other.order or exclude_each_other(one, other):
            return False
        return one.root is other.root or getattr(one.root, "name", "") == "__init__"

    def follows(self, later: ProgramEvent, earlier: ProgramEvent) -> bool:
        """Whether `later` happens after a sharding; methods of a class may run in any order, `__init__` first."""
        if any(not guard.taken and _IS_SHARDED.search(guard.key) for guard in later.guards):
            return False  # the other branch of `isinstance(model, FSDPModule)`
        if later.root is not earlier.root:
            return getattr(later.root, "name", "") != "__init__"
        return earlier.order < later.order and not exclude_each_other(earlier, later)

    def is_part_of(self, inner: Value, outer: Value) -> bool:
        """Whether `inner` is reached from `outer` by a path, or was assigned to it; False for the object itself."""
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
        """Whether two values are equal or one is part of the other."""
        return a == b or self.is_part_of(a, b) or self.is_part_of(b, a)

    def _shards_of(self, value: Value, at: ProgramEvent) -> list[Shard]:
        return [shard for shard in self.shards if shard.subject == value and self.follows(at, shard.event)]

    def is_sharded(self, value: Value, at: ProgramEvent) -> bool:
        """Whether the module itself is sharded when `at` happens."""
        return bool(self._shards_of(value, at))

    def is_sharded_by_hand(self, value: Value, at: ProgramEvent) -> bool:
        """Whether it is sharded by `fully_shard`: `sw.shard` handles `forward`, `.data` and unsharded parameters."""
        found = self._shards_of(value, at)
        return bool(found) and not any(shard.is_automatic for shard in found)

    def holds_shards(self, value: Value, at: ProgramEvent) -> Shard | None:
        """Return the sharding before `at` of this module, of one inside it, or of one around it."""
        related = (shard for shard in self.shards if self.follows(at, shard.event))
        return next((shard for shard in related if self.are_related(shard.subject, value)), None)


def makes_optimizer(name: str) -> bool:
    """Whether the name of a function or class is that of an optimizer or its builder."""
    return _OPTIMIZERS.search(name) is not None and not _NOT_OPTIMIZERS.search(name)


def _optimized(event: ProgramEvent) -> frozenset[ObjectRef]:
    """Return the modules whose parameters an event passes to a new optimizer; empty if it creates none."""
    names = [origin.rpartition(".")[2] for origin in event.origins] or [event.method]
    if not any(map(makes_optimizer, names)):
        return frozenset()
    given = [*event.args, *(entry.values for entry in event.keywords.values())]
    owners = owners_of_params(frozenset().union(*given))
    if not owners and any(map(_BUILDS_OPTIMIZER.match, names)):
        owners = set(modules(event.argument(0, "model")))
    return frozenset(owners)
