"""Values that an expression of a program may have, and events: the calls and assignments of a program."""

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
    """An object created by a call or passed as a parameter, or a part of one; equal for the same object."""

    site: ast.AST
    """The call or parameter that introduces it."""
    chain: tuple[ast.Call, ...] = ()
    """The calls through which the site was reached: a builder that is called twice builds two objects."""
    turn: tuple[int, ...] = ()
    """The loop iterations in which it was created, for loops whose iterations are read separately."""
    origins: frozenset[str] = frozenset()
    """Dotted names of the function or class that created it."""
    definition: ast.ClassDef | None = None
    """Its class, if the file defines it."""
    on_meta: bool = False
    """Whether it was created on the meta device."""
    owner: ObjectRef | None = None
    """For a part: the object that it was reached from. Other fields of a part are unknown."""
    path: tuple[str, ...] = ()
    """For a part: attributes and items, such as ("layers", "[]") for `model.layers[i]`."""

    def __hash__(self) -> int:
        return hash((self.site, self.path))  # fast: the codemod hashes these all the time

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
        """The object that a part was reached from; for any other object, itself."""
        return self.owner or self

    @property
    def parent(self) -> ObjectRef:
        """The object or part of which this part is an attribute or item."""
        return ObjectRef(self.site, owner=self.owner, path=self.path[:-1]) if len(self.path) > 1 else self.whole

    @functools.lru_cache(1 << 16)  # noqa: B019 (equal parts are the same object and compare fast)
    def part(self, name: str) -> ObjectRef:
        """Return the part at `.name` or `[...]`."""
        return ObjectRef(self.site, owner=self.whole, path=(*self.path, name))


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of a module."""

    owner: ObjectRef


@dataclass(frozen=True, slots=True)
class StateDict:
    """The result of a state-dict call for a module or optimizer."""

    owner: ObjectRef
    call: ast.Call
    is_full: bool | None = None
    """Whether its tensors are full; None if the options are computed."""


@dataclass(frozen=True, slots=True)
class Items:
    """An iterable whose elements all have the same possible values."""

    element: Values


@dataclass(frozen=True, slots=True)
class TupleValue:
    """A tuple or list with known elements."""

    items: tuple[Values, ...]


@dataclass(frozen=True, slots=True)
class DictEntry:
    """A key of a dictionary, or a keyword argument."""

    key: str
    values: Values
    node: ast.expr


@dataclass(frozen=True, slots=True)
class DictValue:
    """A dictionary with known keys."""

    entries: tuple[DictEntry, ...] = ()
    is_open: bool = False
    """Whether there may be other keys."""

    def get(self, key: object) -> Values:
        """Return the values of this key; all values if the key is None."""
        if key is None:
            return join(*(entry.values for entry in self.entries))
        return next((entry.values for entry in reversed(self.entries) if entry.key == key), UNKNOWN)


@dataclass(frozen=True, slots=True)
class Constant:
    """A literal."""

    value: Any


@dataclass(frozen=True, slots=True)
class ImportedName:
    """An imported name, such as `torch.bfloat16`."""

    origins: frozenset[str]


@dataclass(frozen=True, slots=True)
class FunctionRef:
    """A function of this file, and the object it is bound to."""

    definition: Function
    bound_to: ObjectRef | None = None
    env: Env | None = field(default=None, compare=False)
    """The names around a nested function."""


Value = ObjectRef | Param | StateDict | Items | TupleValue | DictValue | Constant | ImportedName | FunctionRef
Values = frozenset[Value]
"""Possible values; empty: unknown."""
Env = dict[str, Values]
UNKNOWN: Values = frozenset()
_MAX_ALTERNATIVES = 6


def join(*sets: Values) -> Values:
    """Return the union; dictionaries are merged into one with the keys of all; too many values become unknown."""
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
    """Return a literal key or index; None if it is computed."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, int | str) else None


def merged(parts: Iterable[Values]) -> DictValue:
    """Merge dictionaries into one; it is open if one of them is open, or is not known to be a dictionary."""
    entries: list[DictEntry] = []
    is_open = False
    for values in parts:
        tables = [value for value in values if isinstance(value, DictValue)]
        entries += [entry for table in tables for entry in table.entries]
        is_open |= len(tables) < max(len(values), 1) or any(table.is_open for table in tables)
    return DictValue(tuple(entries), is_open)


def either(one: Env, other: Env) -> Env:
    """Return the names after two branches, either of which may have been taken."""
    return {name: join(one.get(name, UNKNOWN), other.get(name, UNKNOWN)) for name in one.keys() | other.keys()}


def pairs(values: Values) -> Values:
    """Return the values of `enumerate` and `items`: pairs of an unknown value and one of the given values."""
    return frozenset({Items(frozenset({TupleValue((UNKNOWN, values))}))})


def modules(values: Values) -> list[ObjectRef]:
    """Return the values that may be modules."""
    return [value for value in values if isinstance(value, ObjectRef)]


def nested(values: Values, depth: int = 4) -> Iterator[Value]:
    """Yield values, and recursively the values inside iterables and dictionaries."""
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
    """Return the modules whose parameters are inside these values, at any depth."""
    return {value.owner for value in nested(values) if isinstance(value, Param)}


@dataclass(frozen=True, slots=True)
class BranchTest:
    """A test on the way to an event, and its outcome."""

    test: ast.expr | ast.ExceptHandler
    taken: bool
    key: str
    """The text of the test, to compare tests; for a name, the text of its assigned value."""
    branch: tuple[ast.AST, bool]
    """The whole test, of which `test` may be a part, and its outcome."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProgramEvent:
    """A call, or an assignment to an attribute, in program order."""

    node: ast.Call | ast.Attribute
    """The call, or the target of the assignment."""
    order: int
    root: ast.AST
    """The module or function from which the event was reached; the order of roots is unknown."""
    guards: tuple[BranchTest, ...]
    chain: tuple[ast.Call, ...]
    """The calls of functions in this file through which the event was reached."""
    contexts: tuple[ProgramEvent, ...]
    """The calls in `with` statements around it, in this function and in its callers."""
    loop: ast.For | ast.AsyncFor | ast.While | None
    """The innermost loop around it, also across function calls."""
    origins: frozenset[str] = frozenset()
    receiver: Values = frozenset()
    """The object of the method call or attribute assignment."""
    method: str = ""
    """The last component of the called or assigned name."""
    args: tuple[Values, ...] = ()
    keywords: Mapping[str, DictEntry] = field(default_factory=dict)
    is_open: bool = False
    """Whether it has `*` or `**` arguments of unknown content."""
    called: Values = frozenset()
    """The called values, if a value is called instead of an imported name."""
    is_inlined: bool = False
    """Whether the called function is in this file; its events follow."""
    result: Values = frozenset()

    @property
    def is_store(self) -> bool:
        """Whether it is an assignment, not a call."""
        return isinstance(self.node, ast.Attribute)

    @property
    def line(self) -> int:
        """Line number of its start."""
        return self.node.lineno

    def is_call_to(self, *names: str) -> bool:
        """Whether it is a call of one of these public names."""
        return not self.origins.isdisjoint(names)  # assignments have no origins

    def argument(self, position: int | None, *keywords: str) -> Values:
        """Return the values of a positional or keyword argument; empty if absent or unknown."""
        if position is not None and position < len(self.args):
            return self.args[position]
        return next((self.keywords[name].values for name in keywords if name in self.keywords), frozenset())


def exclude_each_other(one: ProgramEvent, other: ProgramEvent) -> bool:
    """Whether the tests before both events contradict each other, judged by their text."""
    return any(contradict(a, b) for a in one.guards for b in other.guards)


def contradict(a: BranchTest, b: BranchTest) -> bool:
    """Whether two test outcomes are impossible in the same run, judged by the tests' text."""
    if a.branch[0] is b.branch[0] and a.branch[1] != b.branch[1]:
        return True
    (key, holds), (other_key, other_holds) = _tested(a), _tested(b)
    if key == other_key:
        return holds != other_holds
    left, right = _comparison(a.test), _comparison(b.test)
    if left is None or right is None or left[0] != right[0]:
        return False
    # `world_size > 1` and `world_size == 1`: no constant of the tests, nor a value near one, satisfies both.
    values: set[Any] = {"anything else", *left[2], *right[2]}
    numbers = [value for value in values if isinstance(value, int | float)]
    values.update(number + step for number in numbers for step in (-1, -0.5, 0.5, 1))
    return not any(left[1](value) is a.taken and right[1](value) is b.taken for value in values)


def _tested(guard: BranchTest) -> tuple[str, bool]:
    """Return the text of a test without `not`, and whether it holds."""
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
    """Parse a comparison with constants; return its left side, a function that evaluates it, and the constants."""
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
    """Whether a literal is a number, string, bool or None."""
    return isinstance(value, str | int | float | None)
