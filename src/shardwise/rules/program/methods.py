"""What well-known methods and builtins return: `.to()` the module itself, `.parameters()` its parameters."""

from __future__ import annotations

import ast
from collections.abc import Callable

from shardwise.rules.program.events import Event
from shardwise.rules.program.expressions import iterate
from shardwise.rules.program.values import (
    UNKNOWN,
    Constant,
    Entry,
    Items,
    Param,
    Params,
    Part,
    Row,
    StateDict,
    Table,
    Thing,
    Value,
    Values,
    attribute,
    join,
)
from shardwise.rules.program.walk import ITEM, Walk

DESCENDANT = "modules()"
_SAME = frozenset(
    {"to", "cuda", "cpu", "half", "float", "double", "bfloat16", "train", "eval", "requires_grad_", "to_empty", "apply"}
)
_SAME_TENSORS = frozenset({"detach", "to", "float", "cpu", "values", "clone"})
_SAME_STATE = frozenset(
    {"copy", "to", "cpu", "get", "values", "detach", "clone", "contiguous", "half", "float", "bfloat16"}
)
_COLLECTIONS = frozenset({"list", "tuple", "set", "sorted", "iter", "filter"})


def method_result(walk: Walk, call: ast.Call, event: Event) -> Values | None:
    """What a well-known method returns; None where the method is not one of those."""
    if event.method in ("append", "add", "extend") and event.args:
        _append(walk, call, event)
    found = [values for one in event.receiver if (values := _returned_by(walk, call, event, one)) is not None]
    return join(*found) if found else None


def _returned_by(walk: Walk, call: ast.Call, event: Event, one: Value) -> Values | None:
    name = event.method
    match one:
        case Thing() | Part():
            return _returned_by_module(walk, call, name, one)
        case Param() | Params() | Items() if name in _SAME_TENSORS:
            return frozenset({one})
        case StateDict() if name in _SAME_STATE:
            return frozenset({one})
        case StateDict() if name == "items":
            return _pairs(frozenset({one}))
        case Table() if name == "update":
            _update(walk, call, event, one)
            return frozenset({Constant(None)})
        case Table() if name in ("get", "pop") and call.args:
            key = call.args[0].value if isinstance(call.args[0], ast.Constant) else None
            entry = one.get(key) if isinstance(key, str) else None
            return entry.values if entry else UNKNOWN
    return None


def _returned_by_module(walk: Walk, call: ast.Call, name: str, one: Thing | Part) -> Values | None:
    if isinstance(one, Thing) and one.definition is not None and walk.find_method(one.definition, name) is not None:
        return None  # the class has one of its own
    if name in _SAME:
        return frozenset({one})
    if name == "state_dict":
        return frozenset({StateDict(one, call)})
    return _MODULE_METHODS[name](walk, one) if name in _MODULE_METHODS else None


def _append(walk: Walk, call: ast.Call, event: Event) -> None:
    added = iterate(walk, event.args[0]) if event.method == "extend" else event.args[0]
    for one in event.receiver:
        if isinstance(one, Thing | Part):
            walk.store(one, ITEM, added)
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if isinstance(owner, ast.Name) and any(isinstance(one, Row | Items) for one in event.receiver):
        elements = join(*(iterate(walk, frozenset({one})) for one in event.receiver), added)
        walk.env[owner.id] = frozenset({Items(elements)})


def _update(walk: Walk, call: ast.Call, event: Event, table: Table) -> None:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    added = [Entry(key, argument.values, argument.node) for key, argument in event.keywords.items()]
    tables = [value for values in event.args for value in values if isinstance(value, Table)]
    added += [entry for one in tables for entry in one.entries]
    is_open = table.is_open or event.is_open or len(tables) < len(event.args)
    if isinstance(owner, ast.Name):
        walk.env[owner.id] = frozenset({Table((*table.entries, *added), is_open)})


def _elements(walk: Walk, one: Thing | Part) -> Values:
    return walk.load(one, ITEM)


def _pairs(values: Values) -> Values:
    return frozenset({Items(frozenset({Row((UNKNOWN, values))}))})


_MODULE_METHODS: dict[str, Callable[[Walk, Thing | Part], Values]] = {
    "parameters": lambda walk, one: frozenset({Params(one)}),
    "named_parameters": lambda walk, one: _pairs(frozenset({Param(one)})),
    "modules": lambda walk, one: frozenset({Items(frozenset({attribute(one, DESCENDANT)}))}),
    "named_modules": lambda walk, one: _pairs(frozenset({attribute(one, DESCENDANT)})),
    "children": lambda walk, one: frozenset({Items(_elements(walk, one))}),
    "named_children": lambda walk, one: _pairs(_elements(walk, one)),
    "values": lambda walk, one: frozenset({Items(_elements(walk, one))}),
    "items": lambda walk, one: _pairs(_elements(walk, one)),
}


def builtin_result(walk: Walk, event: Event) -> Values | None:
    """What Python's own functions on iterables return."""
    if event.origins or not event.args:
        return frozenset({Items(UNKNOWN)}) if event.method in ("list", "set") and not event.origins else None
    name, last = event.method, event.args[-1]
    if name in _COLLECTIONS:
        return last
    if name == "reversed":
        return frozenset({Items(iterate(walk, last), is_reversed=True)})
    if name == "enumerate":
        return _pairs(iterate(walk, event.args[0]))
    if name == "zip":
        return frozenset({Items(frozenset({Row(tuple(iterate(walk, arg) for arg in event.args))}))})
    if name == "getattr" and len(event.args) >= 2:
        names = [value.value for value in event.args[1] if isinstance(value, Constant)]
        owners = [one for one in event.args[0] if isinstance(one, Thing | Part)]
        return join(*(walk.load(one, str(name)) for one in owners for name in names))
    return None
