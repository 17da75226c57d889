"""Operators: arithmetic, comparison, `and`, `or`, `not` and conditional expressions."""

import ast
import operator
from typing import Any

from torch import nn

from shardwise.planning.source.attributes import use_as_data
from shardwise.planning.source.containers import item
from shardwise.planning.source.frames import Frame, evaluate, expression
from shardwise.planning.source.records import consume
from shardwise.planning.source.tensors import compare
from shardwise.planning.source.truth import truth
from shardwise.planning.source.values import (
    PLAIN,
    Known,
    Many,
    Sequence,
    Source,
    Unknown,
    Value,
    join,
    known,
    opaque,
)

_ARITHMETIC: dict[type[ast.operator], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Div: operator.truediv,
}  # fmt: skip
_COMPARISON: dict[type[ast.cmpop], Any] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many, ast.NotIn: lambda one, many: one not in many,
}  # fmt: skip
_SIMPLE = (bool, int, float, str, type(None))


@expression(ast.BinOp)
def _binary(node: ast.BinOp, frame: Frame) -> Value:
    left, right = evaluate(node.left, frame), evaluate(node.right, frame)
    return combine(left, right, node.op, frame)


def combine(left: Value, right: Value, op: ast.operator, frame: Frame) -> Value:
    """`left op right`: numbers are computed, lists joined, everything else is data."""
    one, other = left.only(), right.only()
    settings, loops = left.settings | right.settings, left.loops | right.loops
    if type(one) in (int, float, str) and type(other) is type(one) and type(op) in _ARITHMETIC:
        try:
            if isinstance(one, str) or (abs(one) < 1e9 and abs(other) < 1e9):
                return known(_ARITHMETIC[type(op)](one, other), settings=settings).like(loops=loops)
        except (TypeError, ZeroDivisionError):
            return opaque(left, right)
    if isinstance(op, ast.Add | ast.Mult) and (_is_list(left) or _is_list(right)):
        return _join_lists([value for value in (left, right) if _is_list(value)], frame)
    result = opaque(use_as_data(left, frame), use_as_data(right, frame))
    if result.source == Source.CONTENT and not isinstance(op, ast.BitAnd | ast.BitOr):
        return result.like(source=Source.CONTENT if min(left.source, right.source) != Source.TENSOR else Source.TENSOR)
    return result


def _is_list(value: Value) -> bool:
    if not value.atoms or value.open:
        return False
    return all(
        isinstance(atom, Sequence | Many)
        or (isinstance(atom, Known) and isinstance(atom.object, nn.ModuleList | list | tuple))
        for atom in value.atoms
    )


def _join_lists(values: list[Value], frame: Frame) -> Value:
    sequences = [next(iter(value.atoms)) for value in values if len(value.atoms) == 1]
    if len(values) == 2 and len(sequences) == 2 and all(isinstance(one, Sequence) for one in sequences):
        items = tuple(inner for one in sequences if isinstance(one, Sequence) for inner in one.items)
        return Value(frozenset({Sequence(items)}))
    return Value(frozenset({Many(join(item(value, PLAIN, frame) for value in values))}))


@expression(ast.UnaryOp)
def _unary(node: ast.UnaryOp, frame: Frame) -> Value:
    value = evaluate(node.operand, frame)
    if isinstance(node.op, ast.Not):
        answer = truth(value)
        return PLAIN.like(source=value.source) if answer is None else known(not answer, settings=value.settings)
    number = value.only()
    if isinstance(node.op, ast.USub) and type(number) in (int, float):
        return known(-number, settings=value.settings)
    return use_as_data(value, frame)


@expression(ast.BoolOp)
def _boolean(node: ast.BoolOp, frame: Frame) -> Value:
    """`a and b` stops at the first operand that is known to decide."""
    stops_at = isinstance(node.op, ast.Or)
    values = []
    for part in node.values:
        value = evaluate(part, frame)
        answer = truth(value)
        if answer is stops_at:
            frame.analysis.decide(value)
            return value if not values or not stops_at else join([*values, value])
        if answer is None or part is node.values[-1]:
            values.append(value)
        else:
            frame.analysis.decide(value)
    return join(values)


@expression(ast.Compare)
def _compare(node: ast.Compare, frame: Frame) -> Value:
    left = evaluate(node.left, frame)
    results = []
    for op, part in zip(node.ops, node.comparators, strict=True):
        right = evaluate(part, frame)
        results.append(_compare_two(left, op, right, frame))
        left = right
    return results[0] if len(results) == 1 else opaque(*results)


def _compare_two(left: Value, op: ast.cmpop, right: Value, frame: Frame) -> Value:
    settings = left.settings | right.settings
    one, other = left.only(), right.only()
    if isinstance(op, ast.Is | ast.IsNot):
        answer = _same_object(left, right)
        return PLAIN if answer is None else known(answer is isinstance(op, ast.Is), settings=settings)
    if left.source == Source.RANDOM and isinstance(op, ast.Lt | ast.LtE) and other in (0, 0.0) and other is not False:
        return known(False, settings=settings)  # layerdrop that is switched off
    if isinstance(one, _SIMPLE) and isinstance(other, _SIMPLE):
        try:
            return known(bool(_COMPARISON[type(op)](one, other)), settings=settings)
        except (TypeError, KeyError):
            return PLAIN
    if isinstance(op, ast.In | ast.NotIn) and isinstance(one, _SIMPLE):
        members = _constants(right)
        if members is not None:
            return known((one in members) is isinstance(op, ast.In), settings=settings)
    else:
        consume(left, frame)
        consume(right, frame)
    return opaque(left, right, source=compare(left, right))


def _constants(value: Value) -> list[Any] | None:
    """The members of a list of constants, written out or real."""
    things = value.only()
    if type(things) in (list, tuple, set, frozenset, dict):
        return list(things) if all(isinstance(thing, _SIMPLE) for thing in things) else None
    if len(value.atoms) != 1 or value.open or not isinstance(atom := next(iter(value.atoms)), Sequence):
        return None
    members = [inner.only() for inner in atom.items]
    return members if all(isinstance(thing, _SIMPLE) for thing in members) else None


def _same_object(left: Value, right: Value) -> bool | None:
    one, other = left.only(), right.only()
    if one is not Unknown and other is not Unknown:
        return one is other
    for value, thing in ((left, other), (right, one)):
        if thing is None and not value.open and value.atoms and Known(None) not in value.atoms:
            return False
    return None


@expression(ast.IfExp)
def _conditional(node: ast.IfExp, frame: Frame) -> Value:
    test = evaluate(node.test, frame)
    frame.analysis.decide(test)
    answer = truth(test)
    if answer is not None:
        return evaluate(node.body if answer else node.orelse, frame)
    depends = test.source >= Source.TENSOR
    with frame.under(depends):
        result = join([evaluate(node.body, frame), evaluate(node.orelse, frame)])
    return result.like(picked=result.picked or (depends and len(result.atoms) > 1))
