"""What an expression of a program can evaluate to, and the calls that a program makes."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.source.syntax import Function

_REST = operator.attrgetter("origins", "definition", "chain", "turn", "on_meta")


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """An object made by a call or given as a parameter, or a part of one; refs to one object are equal."""

    site: ast.AST
    """The call or parameter."""
    chain: tuple[ast.Call, ...] = ()
    """The calls through which the place was reached: a builder called twice builds two objects."""
    turn: tuple[int, ...] = ()
    """The turns of loops in which it was made, where loops are read turn by turn."""
    origins: frozenset[str] = frozenset()
    """What made it, dotted."""
    definition: ast.ClassDef | None = None
    """Its class, where that is in the file."""
    on_meta: bool = False
    """Made where new tensors have no storage."""
    owner: ObjectRef | None = None
    """Of a part: the object that it was reached from. Nothing else is known of a part."""
    path: tuple[str, ...] = ()
    """Of a part: attributes and items, as ("layers", "[]") of `model.layers[i]`."""

    def __hash__(self) -> int:
        return hash((self.site, self.path))  # sets of them are all that the codemod works on

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, ObjectRef)
            and self.site is other.site
            and self.path == other.path
            and self.owner == other.owner
            and _REST(self) == _REST(other)
        )

    @property
    def whole(self) -> ObjectRef:
        """The object that a part was reached from; any other object itself."""
        return self.owner or self

    @property
    def parent(self) -> ObjectRef:
        """The part that this one is an attribute or item of."""
        return ObjectRef(self.site, owner=self.owner, path=self.path[:-1]) if len(self.path) > 1 else self.whole

    @functools.lru_cache(1 << 16)  # noqa: B019 (parts that are the same object compare at once)
    def part(self, name: str) -> ObjectRef:
        """What `.name` or `[...]` reaches."""
        return ObjectRef(self.site, owner=self.whole, path=(*self.path, name))


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of a module."""

    owner: ObjectRef


@dataclass(frozen=True, slots=True)
class StateDict:
    """What a state-dict call returned for a module or optimizer."""

    owner: ObjectRef
    call: ast.Call
    is_full: bool | None = None
    """Gathered; None where the options are computed."""


@dataclass(frozen=True, slots=True)
class Items:
    """An iterable whose elements are alike."""

    element: Values


@dataclass(frozen=True, slots=True)
class TupleValue:
    """A tuple or list with known elements."""

    items: tuple[Values, ...]


@dataclass(frozen=True, slots=True)
class DictEntry:
    """One key of a dictionary, or one keyword argument."""

    key: str
    values: Values
    node: ast.expr


@dataclass(frozen=True, slots=True)
class DictValue:
    """A dictionary with known keys."""

    entries: tuple[DictEntry, ...] = ()
    is_open: bool = False
    """Other keys may be there."""

    def get(self, key: object) -> Values:
        """The value of this key; every value where the key is None."""
        if key is None:
            return join(*(entry.values for entry in self.entries))
        return next((entry.values for entry in reversed(self.entries) if entry.key == key), UNKNOWN)


@dataclass(frozen=True, slots=True)
class Constant:
    """A literal."""

    value: Any


@dataclass(frozen=True, slots=True)
class ImportedName:
    """An imported name, as `torch.bfloat16`."""

    origins: frozenset[str]


@dataclass(frozen=True, slots=True)
class FunctionRef:
    """A function of this file, with the object it is bound to."""

    definition: Function
    bound_to: ObjectRef | None = None
    env: Env | None = field(default=None, compare=False)
    """The names around a nested function."""


Value = ObjectRef | Param | StateDict | Items | TupleValue | DictValue | Constant | ImportedName | FunctionRef
Values = frozenset[Value]
"""The alternatives; empty means that nothing is known."""
Env = dict[str, Values]
UNKNOWN: Values = frozenset()
_MAX_ALTERNATIVES = 6


def join(*sets: Values) -> Values:
    """Either of them; dictionaries become one that may have the keys of each; too many are as good as none."""
    joined = frozenset().union(*sets)
    tables = [value for value in joined if isinstance(value, DictValue)]
    if len(tables) > 1:
        merged: dict[str, DictEntry] = {}
        for entry in (entry for table in tables for entry in table.entries):
            before = merged[entry.key].values if entry.key in merged else UNKNOWN
            merged[entry.key] = DictEntry(entry.key, join(before, entry.values), entry.node)
        table = DictValue(tuple(merged.values()), any(table.is_open for table in tables))
        joined = joined.difference(tables) | {table}
    return joined if len(joined) <= _MAX_ALTERNATIVES else UNKNOWN


def literal_key(node: ast.expr) -> int | str | None:
    """A literal key or index; None for any other."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, int | str) else None


def merged(parts: Iterable[Values]) -> DictValue:
    """One dictionary out of several; open where one of them is, or is not known to be a dictionary."""
    entries: list[DictEntry] = []
    is_open = False
    for values in parts:
        tables = [value for value in values if isinstance(value, DictValue)]
        entries += [entry for table in tables for entry in table.entries]
        is_open |= len(tables) < max(len(values), 1) or any(table.is_open for table in tables)
    return DictValue(tuple(entries), is_open)


def either(one: Env, other: Env) -> Env:
    """The names after two branches that may both have been taken."""
    return {name: join(one.get(name, UNKNOWN), other.get(name, UNKNOWN)) for name in one.keys() | other.keys()}


def pairs(values: Values) -> Values:
    """What `enumerate` and `items` give: something unknown, and one of the values."""
    return frozenset({Items(frozenset({TupleValue((UNKNOWN, values))}))})


def modules(values: Values) -> list[ObjectRef]:
    """Those of the values that can be modules."""
    return [value for value in values if isinstance(value, ObjectRef)]


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


def owners_of_params(values: Values) -> set[ObjectRef]:
    """The modules whose parameters are somewhere inside these values."""
    return {value.owner for value in nested(values) if isinstance(value, Param)}


@dataclass(frozen=True, slots=True)
class BranchTest:
    """A test that was taken, or not, on the way to an event."""

    test: ast.expr | ast.ExceptHandler
    taken: bool
    key: str
    """The text of what is tested, to recognise the same test elsewhere; of a name, what it was assigned."""
    branch: tuple[ast.AST, bool]
    """The whole test, of which this may be a part, and whether that was taken."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProgramEvent:
    """A call, or an assignment to an attribute, in program order."""

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
    keywords: Mapping[str, DictEntry] = field(default_factory=dict)
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

    @property
    def line(self) -> int:
        """The line where it starts."""
        return self.node.lineno

    def is_call_to(self, *names: str) -> bool:
        """Whether it calls one of these public names."""
        return not self.origins.isdisjoint(names)  # a store has none

    def argument(self, position: int | None, *keywords: str) -> Values:
        """The values of an argument given by position or by keyword; empty where absent or unknown."""
        if position is not None and position < len(self.args):
            return self.args[position]
        return next((self.keywords[name].values for name in keywords if name in self.keywords), frozenset())


def exclude_each_other(one: ProgramEvent, other: ProgramEvent) -> bool:
    """Whether tests on the way to both cannot hold in one run, as far as the tests' text shows."""
    return any(contradict(a, b) for a in one.guards for b in other.guards)


def contradict(a: BranchTest, b: BranchTest) -> bool:
    """Whether two tests cannot come out so in one run, as far as their text shows."""
    if a.branch[0] is b.branch[0] and a.branch[1] != b.branch[1]:
        return True
    (key, holds), (other_key, other_holds) = _tested(a), _tested(b)
    if key == other_key:
        return holds != other_holds
    left, right = _comparison(a.test), _comparison(b.test)
    if left is None or right is None or left[0] != right[0]:
        return False
    # `world_size > 1` and `world_size == 1`: no value satisfies both, neither a constant of theirs nor one near it.
    values: set[Any] = {"anything else", *left[2], *right[2]}
    numbers = [value for value in values if isinstance(value, int | float)]
    values.update(number + step for number in numbers for step in (-1, -0.5, 0.5, 1))
    return not any(left[1](value) is a.taken and right[1](value) is b.taken for value in values)


def _tested(guard: BranchTest) -> tuple[str, bool]:
    """What a test asks, without `not`, and whether it holds."""
    return guard.key.removeprefix("not "), guard.taken != guard.key.startswith("not ")


_OPERATIONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.eq,
    ast.IsNot: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, some: value in some,
    ast.NotIn: lambda value, some: value not in some,
}


def _comparison(test: ast.AST) -> tuple[str, Callable[[Any], bool | None], list[Any]] | None:
    """A comparison with constants: of what, whether it holds for a value, and the constants."""
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1):
        return None
    right = test.comparators[0]
    is_list = isinstance(right, ast.Tuple | ast.List | ast.Set)
    constants = [getattr(one, "value", ...) for one in (right.elts if is_list else [right])]
    if is_list != isinstance(test.ops[0], ast.In | ast.NotIn) or not all(map(is_plain, constants)):
        return None

    def holds(value: Any) -> bool | None:
        try:
            return _OPERATIONS[type(test.ops[0])](value, constants if is_list else constants[0])
        except TypeError:  # `"a" < 1`
            return None

    left = test.left.target if isinstance(test.left, ast.NamedExpr) else test.left
    return ast.unparse(left), holds, constants


def is_plain(value: object) -> bool:
    """Whether a literal is a number, a text, a flag or None."""
    return isinstance(value, str | int | float | None)
