"""Lists, dictionaries, comprehensions and f-strings written in the code."""

import ast
import re
from typing import Any

from shardwise.planning.source.containers import item
from shardwise.planning.source.frames import Frame, evaluate, expression
from shardwise.planning.source.loops import comprehension
from shardwise.planning.source.values import (
    PLAIN,
    Known,
    Many,
    Mapping,
    Sequence,
    Unknown,
    Value,
    join,
    known,
    opaque,
)


@expression(ast.Tuple, ast.List, ast.Set)
def _sequence(node: ast.Tuple | ast.List | ast.Set, frame: Frame) -> Value:
    items: list[Value] = []
    for part in node.elts:
        value = evaluate(part.value if isinstance(part, ast.Starred) else part, frame)
        if not isinstance(part, ast.Starred):
            items.append(value)
        elif len(value.atoms) == 1 and not value.open and isinstance(inner := next(iter(value.atoms)), Sequence):
            items += inner.items
        else:
            rest = item(value, PLAIN, frame)
            return Value(
                frozenset({Many(join([*items, rest, *(evaluate(p, frame) for p in node.elts[len(items) :])]))})
            )
    return Value(frozenset({Sequence(tuple(items))}))


@expression(ast.Starred)
def _starred(node: ast.Starred, frame: Frame) -> Value:
    return item(evaluate(node.value, frame), PLAIN, frame)


@expression(ast.Dict)
def _dict(node: ast.Dict, frame: Frame) -> Value:
    rows: dict[Any, Value] = {}
    loose: list[Value] = []
    for key, part in zip(node.keys, node.values, strict=True):
        value = evaluate(part, frame)
        name = evaluate(key, frame).only() if key is not None else Unknown
        if isinstance(name, str | int):
            rows[name] = value
        else:
            loose.append(value)
    if loose:
        return Value(frozenset({Mapping((*rows.items(), (None, join(loose))))}), open=True)
    return Value(frozenset({Mapping(tuple(rows.items()))}))


@expression(ast.ListComp, ast.SetComp, ast.GeneratorExp)
def _comprehension(node: ast.ListComp, frame: Frame) -> Value:
    return comprehension(node.generators, [node.elt], frame)


@expression(ast.DictComp)
def _dict_comprehension(node: ast.DictComp, frame: Frame) -> Value:
    return comprehension(node.generators, [node.key, node.value], frame)


@expression(ast.JoinedStr)
def _f_string(node: ast.JoinedStr, frame: Frame) -> Value:
    values = [evaluate(part.value if isinstance(part, ast.FormattedValue) else part, frame) for part in node.values]
    objects = [value.only() for value in values]
    together = opaque(*values)
    if all(isinstance(thing, str | int) for thing in objects):
        text = "".join(str(thing) for thing in objects)
        return known(text, settings=together.settings).like(loops=together.loops)
    pattern = "".join(re.escape(str(thing)) if isinstance(thing, str | int) else ".*" for thing in objects)
    return together.like(atoms=frozenset({Known(re.compile(pattern))}))
