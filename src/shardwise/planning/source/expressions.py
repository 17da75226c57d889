"""How each kind of Python expression is evaluated."""

import ast
from typing import Any

from shardwise.planning.source.arguments import evaluate_arguments
from shardwise.planning.source.attributes import load
from shardwise.planning.source.containers import item
from shardwise.planning.source.frames import Frame, evaluate, expression
from shardwise.planning.source.invoke import hand_over, invoke
from shardwise.planning.source.module_methods import container_method
from shardwise.planning.source.records import consume
from shardwise.planning.source.tensors import (
    method_reads_arguments,
    method_reads_content,
    method_result,
)
from shardwise.planning.source.values import (
    NONE,
    PLAIN,
    Closure,
    Known,
    Many,
    Sequence,
    Source,
    Value,
    join,
    known,
)


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
    bounds = [evaluate(part, frame) if part is not None else NONE for part in (node.lower, node.upper, node.step)]
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
        results.append(invoke(load(rest.like(open=False), name, frame).like(loops=rest.loops), arguments, frame))
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


@expression(ast.Lambda)
def _lambda(node: ast.Lambda, frame: Frame) -> Value:
    return Value(frozenset({Closure(node, frame)}))


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
