"""What an expression of a program can evaluate to, and the calls that a program makes."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.source.syntax import Function


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """An object made by a call, or handed in as a parameter; two things of one place are one thing."""

    site: ast.AST
    """The call or parameter."""
    chain: tuple[ast.Call, ...] = ()
    """The calls through which the place was reached: a builder called twice builds two things."""
    origins: frozenset[str] = frozenset()
    """What made it, dotted."""
    definition: ast.ClassDef | None = None
    """Its class, where that is in the file."""
    on_meta: bool = False
    """Made where new tensors have no storage."""
    turn: tuple[int, ...] = ()
    """The turns of loops in which it was made, where loops are read turn by turn."""


@dataclass(frozen=True, slots=True)
class PartRef:
    """Something reached from a thing by attributes and items: `model.layers[0]` is ("layers", "[]")."""

    owner: ObjectRef
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Params:
    """Some or all parameters of a module, as an iterable."""

    owner: ObjectRef | PartRef


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of a module."""

    owner: ObjectRef | PartRef


@dataclass(frozen=True, slots=True)
class StateDict:
    """What a state-dict call returned for a module or optimizer."""

    owner: ObjectRef | PartRef
    call: ast.Call
    is_full: bool | None = None
    """Gathered; None where the options are computed."""


@dataclass(frozen=True, slots=True)
class Items:
    """An iterable whose elements are alike."""

    element: Values
    is_reversed: bool = False


@dataclass(frozen=True, slots=True)
class TupleValue:
    """A tuple or list with known elements."""

    items: tuple[Values, ...]


@dataclass(frozen=True, slots=True)
class DictEntry:
    """One key of a dictionary."""

    key: str
    values: Values
    node: ast.expr


@dataclass(frozen=True, slots=True)
class DictValue:
    """A dictionary with known keys."""

    entries: tuple[DictEntry, ...]
    is_open: bool = False
    """Other keys may be there."""

    def get(self, key: str) -> DictEntry | None:
        """The last entry of this key."""
        return next((entry for entry in reversed(self.entries) if entry.key == key), None)


@dataclass(frozen=True, slots=True)
class Constant:
    """A literal."""

    value: Any


@dataclass(frozen=True, slots=True)
class ImportedName:
    """An imported name, as `torch.bfloat16`."""

    origins: frozenset[str]


@dataclass(frozen=True, slots=True)
class Code:
    """A function of this file, with the object it is bound to."""

    definition: Function
    bound_to: ObjectRef | PartRef | None = None
    env: Env | None = field(default=None, compare=False)
    """The names around a nested function."""


Value = (
    ObjectRef | PartRef | Params | Param | StateDict | Items | TupleValue | DictValue | Constant | ImportedName | Code
)
Values = frozenset[Value]
"""The alternatives; empty means that nothing is known."""
Env = dict[str, Values]
UNKNOWN: Values = frozenset()
MAX_ALTERNATIVES = 6


def join(*sets: Values) -> Values:
    """Either of them; dictionaries become one that may have the keys of each; too many are as good as none."""
    joined = frozenset().union(*sets)
    if sum(isinstance(value, DictValue) for value in joined) > 1:
        tables = [value for value in joined if isinstance(value, DictValue)]
        joined = joined.difference(tables) | {_merge_tables(tables)}
    return joined if len(joined) <= MAX_ALTERNATIVES else UNKNOWN


def _merge_tables(tables: list[DictValue]) -> DictValue:
    merged: dict[str, DictEntry] = {}
    for entry in (entry for table in tables for entry in table.entries):
        before = merged.get(entry.key)
        values = entry.values if before is None else join(before.values, entry.values)
        merged[entry.key] = DictEntry(entry.key, values, entry.node)
    return DictValue(tuple(merged.values()), any(table.is_open for table in tables))


def attribute(value: ObjectRef | PartRef, name: str) -> PartRef:
    """The part of a value that `.name` or `[...]` reaches."""
    if isinstance(value, ObjectRef):
        return PartRef(value, (name,))
    return PartRef(value.owner, (*value.path, name))


def nested(values: Values, depth: int = 4) -> Iterator[Value]:
    """Values, and what is inside those that are iterables or dictionaries."""
    for value in values if depth else ():
        match value:
            case Items():
                yield from nested(value.element, depth - 1)
            case TupleValue():
                yield from nested(frozenset().union(*value.items), depth - 1)
            case DictValue():
                yield from nested(frozenset().union(*(entry.values for entry in value.entries)), depth - 1)
            case _:
                yield value


def owners_of_params(values: Values) -> set[ObjectRef | PartRef]:
    """The modules whose parameters are somewhere inside these values."""
    return {value.owner for value in nested(values) if isinstance(value, Params | Param)}


def state_dicts_in(values: Values) -> set[StateDict]:
    """The state dicts somewhere inside these values."""
    return {value for value in nested(values) if isinstance(value, StateDict)}


_OPERATIONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@dataclass(frozen=True, slots=True)
class BranchTest:
    """A test that was taken, or not, on the way to an event."""

    test: ast.expr | ast.ExceptHandler
    taken: bool
    key: str
    """The test's text without `not`, to recognise the same test elsewhere."""
    branch: tuple[ast.AST, bool]
    """The whole test, of which this may be a part, and whether that was taken."""


@dataclass(frozen=True, slots=True)
class KeywordArgument:
    """A keyword's value and the expression that gives it."""

    values: Values
    node: ast.expr


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProgramEvent:
    """A call, or an assignment to an attribute, in the order in which the program comes by."""

    node: ast.Call | ast.Attribute
    """The call, or the target of the assignment."""
    order: int
    root: ast.AST
    """The module or function from which the event was reached; roots have no order among themselves."""
    guards: tuple[BranchTest, ...]
    chain: tuple[ast.Call, ...]
    """The calls of functions of this file through which it was reached."""
    contexts: tuple[ProgramEvent, ...]
    """The `with` blocks around it, of this function and of its callers."""
    loop: ast.For | ast.AsyncFor | ast.While | None
    """The innermost loop around it, also across calls."""
    origins: frozenset[str] = frozenset()
    receiver: Values = frozenset()
    """What the method is called on, or the attribute set on."""
    method: str = ""
    """The name behind the last dot."""
    args: tuple[Values, ...] = ()
    keywords: Mapping[str, KeywordArgument] = field(default_factory=dict)
    is_open: bool = False
    """Has `*` or `**` arguments that could not be read."""
    called: Values = frozenset()
    """What is called, where that is a value rather than a name or a method."""
    is_inlined: bool = False
    """A function of this file, whose own events follow."""
    result: Values = frozenset()

    @property
    def is_store(self) -> bool:
        """An assignment rather than a call."""
        return isinstance(self.node, ast.Attribute)

    def is_call_to(self, *names: str) -> bool:
        """Whether it calls one of these public names."""
        return not self.is_store and not self.origins.isdisjoint(names)

    def argument(self, position: int, keyword: str = "") -> Values:
        """The values of an argument given by position or by keyword; empty where absent or unknown."""
        if position < len(self.args):
            return self.args[position]
        return self.keywords[keyword].values if keyword in self.keywords else frozenset()


def exclude_each_other(one: ProgramEvent, other: ProgramEvent) -> bool:
    """Whether tests on the way to both cannot hold in one run, as far as the tests' text shows."""
    return any(_contradict(a, b) for a in one.guards for b in other.guards)


def _contradict(a: BranchTest, b: BranchTest) -> bool:
    if a.branch[0] is b.branch[0] and a.branch[1] != b.branch[1]:
        return True
    if a.key == b.key:
        return a.taken != b.taken
    if a.taken and b.taken:
        mine, others = _equality(a), _equality(b)
        if mine is not None and others is not None and mine[0] == others[0] and mine[1].isdisjoint(others[1]):
            return True
    return _no_number_satisfies(a, b)


def _no_number_satisfies(a: BranchTest, b: BranchTest) -> bool:
    """`world_size > 1` and `world_size == 1`: two comparisons of one thing with numbers that cannot both hold."""
    mine, others = _comparison(a), _comparison(b)
    if mine is None or others is None or mine[0] != others[0]:
        return False
    numbers = {number + step for number in (mine[2], others[2]) for step in (-1, -0.5, 0, 0.5, 1)}
    return not any(
        mine[1](number, mine[2]) == a.taken and others[1](number, others[2]) == b.taken for number in numbers
    )


def _comparison(guard: BranchTest) -> tuple[str, Callable[[float, float], bool], float] | None:
    test = guard.test
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.comparators[0], ast.Constant)):
        return None
    number, operation = test.comparators[0].value, _OPERATIONS.get(type(test.ops[0]))
    if operation is None or isinstance(number, bool) or not isinstance(number, int | float):
        return None
    return ast.dump(test.left), operation, number


def _equality(guard: BranchTest) -> tuple[str, frozenset[object]] | None:
    """`x == "a"` or `x in ("a", "b")` as (x, its possible values)."""
    test = guard.test
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1):
        return None
    right = test.comparators[0]
    if isinstance(test.ops[0], ast.Eq) and isinstance(right, ast.Constant):
        return ast.dump(test.left), frozenset({right.value})
    if isinstance(test.ops[0], ast.In) and isinstance(right, ast.Tuple | ast.List | ast.Set):
        constants = [item.value for item in right.elts if isinstance(item, ast.Constant)]
        return (ast.dump(test.left), frozenset(constants)) if len(constants) == len(right.elts) else None
    return None


@dataclass(slots=True)
class Trace:
    """The events of one way through a file: its main program, or one function or class that nobody here calls."""

    events: list[ProgramEvent] = field(default_factory=list)
    owners: dict[Value, set[ObjectRef | PartRef]] = field(default_factory=dict)
    """Whose attribute or item a thing became."""

    def calls_to(self, *names: str) -> list[ProgramEvent]:
        """Every call of one of these public names, in order."""
        return [event for event in self.events if event.is_call_to(*names)]

    def precedes(self, one: ProgramEvent, other: ProgramEvent) -> bool:
        """Whether `one` comes before `other` in one and the same run."""
        if one.order >= other.order or exclude_each_other(one, other):
            return False
        return one.root is other.root or getattr(one.root, "name", "") == "__init__"

    def is_part_of(self, inner: Value, outer: Value) -> bool:
        """Whether `inner` is reached from `outer`, by a path or by having been made its attribute; not itself."""
        return inner != outer and outer in self._around(inner, set())

    def _around(self, value: Value, seen: set[Value]) -> set[Value]:
        if value in seen:
            return seen
        seen.add(value)
        if isinstance(value, PartRef):
            for length in range(len(value.path)):
                self._around(PartRef(value.owner, value.path[:length]) if length else value.owner, seen)
        for owner in self.owners.get(value, ()):
            self._around(owner, seen)
        return seen

    def are_related(self, a: Value, b: Value) -> bool:
        """Whether they are the same or one is part of the other."""
        return a == b or self.is_part_of(a, b) or self.is_part_of(b, a)
