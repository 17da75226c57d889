"""Evaluating expressions to what is known of them; every call inside becomes an event."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.rules.program.values import (
    UNKNOWN,
    Constant,
    Entry,
    Items,
    Param,
    Params,
    Part,
    Reference,
    Row,
    StateDict,
    Table,
    Thing,
    Values,
    join,
)
from shardwise.rules.program.walk import ITEM, Walk
from shardwise.rules.scopes import Comprehension

_MAX_TURNS = 4


def evaluate(walk: Walk, node: ast.expr) -> Values:
    """What an expression may be."""
    match node:
        case ast.Constant():
            return frozenset({Constant(node.value)}) if _is_plain(node.value) else UNKNOWN
        case ast.Name():
            return _name(walk, node)
        case ast.Attribute():
            return _attribute(walk, node)
        case ast.Call():
            from shardwise.rules.program.calls import read_call  # calls evaluate their arguments here

            return read_call(walk, node)
        case ast.Subscript():
            return _subscript(walk, node)
        case ast.Tuple() | ast.List() | ast.Set():
            return _display(walk, node)
        case ast.Dict():
            return _dictionary(walk, node)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            return _comprehension(walk, node)
        case ast.IfExp():
            return _conditional(walk, node)
        case ast.BoolOp():
            return join(*(evaluate(walk, value) for value in node.values))
        case ast.NamedExpr():
            values = evaluate(walk, node.value)
            walk.env[node.target.id] = values
            return values
        case ast.Await() | ast.Starred():
            return evaluate(walk, node.value)
        case ast.BinOp():
            return _merged_tables(evaluate(walk, node.left), evaluate(walk, node.right), node)
        case ast.Lambda():
            return UNKNOWN
        case _:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    evaluate(walk, child)
            return UNKNOWN


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _name(walk: Walk, node: ast.Name) -> Values:
    known = walk.look_up(node.id)
    if known or node.id in walk.env:
        return known
    origins = walk.file.origins(node)
    return frozenset({Reference(origins)}) if origins else UNKNOWN


def _attribute(walk: Walk, node: ast.Attribute) -> Values:
    origins = walk.file.origins(node)
    owners = evaluate(walk, node.value)
    found: list[Values] = []
    for owner in owners:
        match owner:
            case Thing() | Part():
                found.append(walk.load(owner, node.attr))
            case Param() if node.attr in ("data", "grad"):
                found.append(frozenset({owner}))
            case Reference():
                found.append(frozenset({Reference(frozenset(f"{o}.{node.attr}" for o in owner.origins))}))
    if origins and not found:
        return frozenset({Reference(origins)})
    return join(*found)


def _subscript(walk: Walk, node: ast.Subscript) -> Values:
    owners = evaluate(walk, node.value)
    evaluate(walk, node.slice)
    key = node.slice.value if isinstance(node.slice, ast.Constant) else None
    found: list[Values] = []
    for owner in owners:
        match owner:
            case Thing() | Part() if isinstance(key, int | str):
                found.append(walk.load(owner, f"[{key!r}]"))  # `layers[0]` is not any of `layers`
            case Thing() | Part():
                found.append(_items_of(walk, owner))
            case Items():
                found.append(owner.element)
            case Row() if isinstance(key, int) and -len(owner.items) <= key < len(owner.items):
                found.append(owner.items[key])
            case Row():
                found.append(join(*owner.items))
            case Table() if isinstance(key, str):
                entry = owner.get(key)
                found.append(entry.values if entry else UNKNOWN)
            case Table():
                found.append(join(*(entry.values for entry in owner.entries)))
    return join(*found)


def _items_of(walk: Walk, owner: Thing | Part) -> Values:
    return walk.load(owner, ITEM)


def _display(walk: Walk, node: ast.Tuple | ast.List | ast.Set) -> Values:
    items: list[Values] = []
    for element in node.elts:
        values = evaluate(walk, element)
        if isinstance(element, ast.Starred):
            return frozenset({Items(join(iterate(walk, values), *items))})
        items.append(values)
    return frozenset({Row(tuple(items))})


def _dictionary(walk: Walk, node: ast.Dict) -> Values:
    entries: list[Entry] = []
    is_open = False
    for key, value in zip(node.keys, node.values, strict=True):
        values = evaluate(walk, value)
        if key is None:
            tables = [one for one in values if isinstance(one, Table)]
            entries += [entry for table in tables for entry in table.entries]
            is_open |= not tables or len(tables) < len(values) or any(table.is_open for table in tables)
        elif isinstance(key, ast.Constant) and isinstance(key.value, str):
            entries.append(Entry(key.value, values, value))
        else:
            evaluate(walk, key)
            entries.append(Entry("", values, value))
            is_open = True
    return frozenset({Table(tuple(entries), is_open)})


def _merged_tables(left: Values, right: Values, node: ast.BinOp) -> Values:
    """`a | b` of dictionaries; any other arithmetic is unknown."""
    tables = [value for value in (*left, *right) if isinstance(value, Table)]
    if isinstance(node.op, ast.BitOr) and tables:
        is_open = len(tables) != 2 or any(table.is_open for table in tables)
        return frozenset({Table(tuple(entry for table in tables for entry in table.entries), is_open)})
    rows = frozenset(value for value in (*left, *right) if isinstance(value, Row | Items | Params))
    return frozenset({Items(rows)}) if isinstance(node.op, ast.Add) and rows else UNKNOWN


def _comprehension(walk: Walk, node: Comprehension) -> Values:
    outer, guards = dict(walk.env), len(walk.guards)
    element = join(*_elements(walk, node, list(node.generators)))
    del walk.guards[guards:]
    walk.env = outer
    owners = {value.owner for value in element if isinstance(value, Param)}
    if owners and len(owners) == len(element):
        return frozenset(Params(owner) for owner in owners)
    return frozenset({Items(element)})


def _elements(walk: Walk, node: Comprehension, generators: list[ast.comprehension]) -> Iterator[Values]:
    """The elements that a comprehension gives, turn by turn."""
    from shardwise.rules.program.statements import assign  # statements evaluate expressions

    if not generators:
        if isinstance(node, ast.DictComp):
            evaluate(walk, node.key)
        yield evaluate(walk, node.value if isinstance(node, ast.DictComp) else node.elt)
        return
    first, *rest = generators
    for value in walk.unroll(turns(walk, evaluate(walk, first.iter))):
        assign(walk, first.target, value)
        for test in first.ifs:
            evaluate(walk, test)
            walk.assume(test, True)
        yield from _elements(walk, node, rest)


def _conditional(walk: Walk, node: ast.IfExp) -> Values:
    evaluate(walk, node.test)
    with walk.guarded(node.test, True):
        body = evaluate(walk, node.body)
    with walk.guarded(node.test, False):
        orelse = evaluate(walk, node.orelse)
    return join(body, orelse)


def turns(walk: Walk, values: Values) -> list[Values]:
    """What the turns of a loop get: each element of a short tuple or list, else one turn that stands for all."""
    if len(values) == 1:
        (value,) = values
        if isinstance(value, Row) and 1 < len(value.items) <= _MAX_TURNS:
            return list(value.items)
    return [iterate(walk, values)]


def iterate(walk: Walk, values: Values) -> Values:
    """What one turn of a loop over these values gets."""
    found: list[Values] = []
    for value in values:
        match value:
            case Items():
                found.append(value.element)
            case Row():
                found.append(join(*value.items))
            case Params():
                found.append(frozenset({Param(value.owner)}))
            case Thing() | Part():
                found.append(_items_of(walk, value))
            case StateDict():
                found.append(frozenset({value}))  # a tensor of it is as full as the whole
    return join(*found)
