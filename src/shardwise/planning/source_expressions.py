"""How each kind of Python expression is evaluated."""

import ast
import operator
import re
from typing import Any

from torch import nn

from shardwise.planning.source_attributes import load, use_as_data
from shardwise.planning.source_builtins import container_method
from shardwise.planning.source_containers import item
from shardwise.planning.source_frames import Frame, consume, evaluate, expression
from shardwise.planning.source_invoke import evaluate_arguments, hand_over, invoke
from shardwise.planning.source_loops import comprehension
from shardwise.planning.source_tensors import (
    compare,
    method_reads_arguments,
    method_reads_content,
    method_result,
)
from shardwise.planning.source_truth import truth
from shardwise.planning.source_values import (
    NONE,
    PLAIN,
    Closure,
    Known,
    Many,
    Mapping,
    Sequence,
    Source,
    Unknown,
    Value,
    join,
    known,
    opaque,
)

_ARITHMETIC: dict[type[ast.operator], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Div: operator.truediv,
}  # fmt: skip
_COMPARISON: dict[type[ast.cmpop], Any] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
_SIMPLE = (bool, int, float, str, type(None))


@expression(ast.Constant)
def _constant(node: ast.Constant, frame: Frame) -> Value:
    return known(node.value)


@expression(ast.Name)
def _name(node: ast.Name, frame: Frame) -> Value:
    return frame.lookup(node.id)


@expression(ast.Attribute)
def _attribute(node: ast.Attribute, frame: Frame) -> Value:
    return load(evaluate(node.value, frame), node.attr, frame)


@expression(ast.Subscript)
def _subscript(node: ast.Subscript, frame: Frame) -> Value:
    return item(evaluate(node.value, frame), evaluate(node.slice, frame), frame)


@expression(ast.Slice)
def _slice(node: ast.Slice, frame: Frame) -> Value:
    bounds = [
        evaluate(part, frame) if part is not None else NONE for part in (node.lower, node.upper, node.step)
    ]
    numbers = [bound.only() for bound in bounds]
    if all(number is None or type(number) is int for number in numbers):
        for bound in bounds:
            frame.analysis.decide(bound)
        return known(slice(*numbers))
    return Value(frozenset({Known(slice)}), open=True, source=max(bound.source for bound in bounds))


@expression(ast.Call)
def _call(node: ast.Call, frame: Frame) -> Value:
    if not isinstance(node.func, ast.Attribute):
        return invoke(evaluate(node.func, frame), evaluate_arguments(node, frame), frame)
    receiver = evaluate(node.func.value, frame)
    name = node.func.attr
    arguments = evaluate_arguments(node, frame)
    if isinstance(node.func.value, ast.Name) and name in ("append", "extend", "insert", "add", "appendleft"):
        return _grow(node.func.value.id, receiver, name, arguments.positional, frame)
    found = container_method(receiver, name, arguments, frame)
    if found is not None:
        return found
    tensors = _tensor_atoms(receiver)
    rest = receiver.like(atoms=receiver.atoms - tensors)
    results = []
    if tensors:
        if method_reads_content(name):
            consume(receiver.like(atoms=tensors), frame)
        results.append(method_result(Value(open=True, source=Source.TENSOR), name, arguments))
    if rest.atoms:
        results.append(
            invoke(load(rest.like(open=False), name, frame).like(loops=rest.loops), arguments, frame)
        )
    if receiver.open or not receiver.atoms or tensors:
        if method_reads_arguments(name) and not rest.atoms:
            hand_over(arguments, frame, name=name)
        results.append(method_result(receiver, name, arguments))
    return join(results)


def _tensor_atoms(value: Value) -> frozenset[Any]:
    import torch

    return frozenset(a for a in value.atoms if isinstance(a, Known) and isinstance(a.object, torch.Tensor))


def _grow(name: str, receiver: Value, how: str, values: list[Value], frame: Frame) -> Value:
    """`blocks.append(block)`: the list may hold one more from here on."""
    added = values[-1] if values else PLAIN
    if not added.atoms and not any(isinstance(atom, Sequence | Many) for atom in receiver.atoms):
        return NONE
    pieces = [added if how != "extend" else item(added, PLAIN, frame)]
    for atom in receiver.atoms:
        if isinstance(atom, Sequence):
            pieces += atom.items
        elif isinstance(atom, Many):
            pieces.append(atom.element)
    grown = Value(frozenset({Many(join(pieces).like(loops=frozenset()))}))
    home: Frame | None = frame
    while home is not None and name not in home.names:
        home = home.outer
    (home or frame).names[name] = grown
    return NONE


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
        return result.like(
            source=Source.CONTENT if min(left.source, right.source) != Source.TENSOR else Source.TENSOR
        )
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
        return (
            PLAIN.like(source=value.source) if answer is None else known(not answer, settings=value.settings)
        )
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
    if (
        left.source == Source.RANDOM
        and isinstance(op, ast.Lt | ast.LtE)
        and other in (0, 0.0)
        and other is not False
    ):
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


@expression(ast.Tuple, ast.List, ast.Set)
def _sequence(node: ast.Tuple | ast.List | ast.Set, frame: Frame) -> Value:
    items: list[Value] = []
    for part in node.elts:
        value = evaluate(part.value if isinstance(part, ast.Starred) else part, frame)
        if not isinstance(part, ast.Starred):
            items.append(value)
        elif (
            len(value.atoms) == 1
            and not value.open
            and isinstance(inner := next(iter(value.atoms)), Sequence)
        ):
            items += inner.items
        else:
            rest = item(value, PLAIN, frame)
            return Value(
                frozenset(
                    {Many(join([*items, rest, *(evaluate(p, frame) for p in node.elts[len(items) :])]))}
                )
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


@expression(ast.Lambda)
def _lambda(node: ast.Lambda, frame: Frame) -> Value:
    return Value(frozenset({Closure(node, frame)}))


@expression(ast.JoinedStr)
def _f_string(node: ast.JoinedStr, frame: Frame) -> Value:
    values = [
        evaluate(part.value if isinstance(part, ast.FormattedValue) else part, frame) for part in node.values
    ]
    objects = [value.only() for value in values]
    together = opaque(*values)
    if all(isinstance(thing, str | int) for thing in objects):
        text = "".join(str(thing) for thing in objects)
        return known(text, settings=together.settings).like(loops=together.loops)
    pattern = "".join(re.escape(str(thing)) if isinstance(thing, str | int) else ".*" for thing in objects)
    return together.like(atoms=frozenset({Known(re.compile(pattern))}))


@expression(ast.NamedExpr)
def _walrus(node: ast.NamedExpr, frame: Frame) -> Value:
    value = evaluate(node.value, frame)
    frame.names[node.target.id] = value
    return value


@expression(ast.Await)
def _await(node: ast.Await, frame: Frame) -> Value:
    return evaluate(node.value, frame)


@expression(ast.Yield)
def _yield(node: ast.Yield, frame: Frame) -> Value:
    frame.yields.append(evaluate(node.value, frame) if node.value is not None else NONE)
    return PLAIN


@expression(ast.YieldFrom)
def _yield_from(node: ast.YieldFrom, frame: Frame) -> Value:
    frame.yields.append(item(evaluate(node.value, frame), PLAIN, frame))
    return PLAIN
