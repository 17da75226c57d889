"""What a rule can know about a value without running the code. Every value is frozen and comparable."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from shardwise.rules.scopes import Function


@dataclass(frozen=True, slots=True)
class Thing:
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
class Part:
    """Something reached from a thing by attributes and items: `model.layers[0]` is ("layers", "[]")."""

    owner: Thing
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Params:
    """Some or all parameters of a module, as an iterable."""

    owner: Thing | Part


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of a module."""

    owner: Thing | Part


@dataclass(frozen=True, slots=True)
class StateDict:
    """What a state-dict call returned for a module or optimizer."""

    owner: Thing | Part
    call: ast.Call
    is_full: bool | None = None
    """Gathered; None where the options are computed."""


@dataclass(frozen=True, slots=True)
class Items:
    """An iterable whose elements are alike."""

    element: Values
    is_reversed: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A tuple or list with known elements."""

    items: tuple[Values, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a dictionary."""

    key: str
    values: Values
    node: ast.expr


@dataclass(frozen=True, slots=True)
class Table:
    """A dictionary with known keys."""

    entries: tuple[Entry, ...]
    is_open: bool = False
    """Other keys may be there."""

    def get(self, key: str) -> Entry | None:
        """The last entry of this key."""
        return next((entry for entry in reversed(self.entries) if entry.key == key), None)


@dataclass(frozen=True, slots=True)
class Constant:
    """A literal."""

    value: Any


@dataclass(frozen=True, slots=True)
class Reference:
    """An imported name, as `torch.bfloat16`."""

    origins: frozenset[str]


@dataclass(frozen=True, slots=True)
class Code:
    """A function of this file, with the object it is bound to."""

    definition: Function
    bound_to: Thing | Part | None = None
    env: Env | None = field(default=None, compare=False)
    """The names around a nested function."""


Value = Thing | Part | Params | Param | StateDict | Items | Row | Table | Constant | Reference | Code
Values = frozenset[Value]
"""The alternatives; empty means that nothing is known."""
Env = dict[str, Values]
UNKNOWN: Values = frozenset()
MAX_ALTERNATIVES = 6


def join(*sets: Values) -> Values:
    """Either of them; dictionaries become one that may have the keys of each; too many are as good as none."""
    joined = frozenset().union(*sets)
    if sum(isinstance(value, Table) for value in joined) > 1:
        tables = [value for value in joined if isinstance(value, Table)]
        joined = joined.difference(tables) | {_merge_tables(tables)}
    return joined if len(joined) <= MAX_ALTERNATIVES else UNKNOWN


def _merge_tables(tables: list[Table]) -> Table:
    merged: dict[str, Entry] = {}
    for entry in (entry for table in tables for entry in table.entries):
        before = merged.get(entry.key)
        values = entry.values if before is None else join(before.values, entry.values)
        merged[entry.key] = Entry(entry.key, values, entry.node)
    return Table(tuple(merged.values()), any(table.is_open for table in tables))


def attribute(value: Thing | Part, name: str) -> Part:
    """The part of a value that `.name` or `[...]` reaches."""
    if isinstance(value, Thing):
        return Part(value, (name,))
    return Part(value.owner, (*value.path, name))


def owners_of_params(values: Values, depth: int = 4) -> set[Thing | Part]:
    """The modules whose parameters are somewhere inside these values."""
    found: set[Thing | Part] = set()
    for value in values if depth else ():
        match value:
            case Params() | Param():
                found.add(value.owner)
            case Items():
                found |= owners_of_params(value.element, depth - 1)
            case Row():
                found |= owners_of_params(frozenset().union(*value.items), depth - 1)
            case Table():
                found |= owners_of_params(frozenset().union(*(e.values for e in value.entries)), depth - 1)
    return found


def state_dicts_in(values: Values, depth: int = 4) -> set[StateDict]:
    """The state dicts somewhere inside these values."""
    found: set[StateDict] = set()
    for value in values if depth else ():
        match value:
            case StateDict():
                found.add(value)
            case Items():
                found |= state_dicts_in(value.element, depth - 1)
            case Row():
                found |= state_dicts_in(frozenset().union(*value.items), depth - 1)
            case Table():
                found |= state_dicts_in(frozenset().union(*(e.values for e in value.entries)), depth - 1)
    return found
