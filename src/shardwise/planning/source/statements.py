"""Statements and expressions of a function body."""

import ast
import operator
import re
import sys
from collections.abc import Callable
from typing import Any

import torch

from shardwise.planning.source import attributes
from shardwise.planning.source import values as v
from shardwise.planning.source.calls import container_method, evaluate_arguments, hand_over, invoke
from shardwise.planning.source.functions import Arguments
from shardwise.planning.source.values import Frame, Origin, Value


def run_loop(iterable: Value | None, body: Callable[[Value], None], frame: Frame) -> bool:
    """Run a loop's body for each item; twice if the items are unknown, so that a turn sees names of the one before.

    Args:
        iterable: Value that the loop iterates over; None for `while`.
        body: Function of the item.
        frame: Frame of the loop.

    Returns:
        Whether the items are known.
    """
    analysis = frame.analysis
    found = attributes.LoopItems(v.PLAIN) if iterable is None else attributes.walk(iterable, frame)
    items = found.items if analysis.steps < v.MOST_STEPS // 2 and len(found.items or ()) <= v.MOST_TURNS else None
    before = (frame.again, frame.conditional, frame.skipping, frame.jumps)
    frame.again, frame.conditional = frame.again or items is None, frame.conditional or found.dynamic
    counts_after = analysis.counts
    for turn, item in enumerate((found.element, found.element) if items is None else items):
        names, analysis.counts, frame.jumps = dict(frame.names), dict(counts_after), []
        body(item)
        # A turn ends after its last statement, `continue` or `break`; one that returns or raises does not continue.
        ends = [*frame.jumps, *([] if frame.dead else [(frame.names, analysis.counts)])]
        if ends and (items is not None or turn == 0):
            counts_after = v.join_counts([counts for _, counts in ends])
        left_out = [names] if items is None or not ends else []
        frame.names = v.join_names([*left_out, *(names for names, _ in ends)])
        frame.dead, frame.skipping = "", before[2]
    analysis.counts = counts_after
    frame.again, frame.conditional, frame.skipping, frame.jumps = before
    return items is not None


def comprehension(generators: list[ast.comprehension], results: list[ast.expr], frame: Frame) -> Value:
    """Return the values of a comprehension; its names are local to it."""
    outside = dict(frame.names)
    made: list[Value] = []

    def level(depth: int) -> bool:
        if depth == len(generators):
            made.append([frame.evaluate(result) for result in results][-1])
            return True
        generator = generators[depth]
        iterable = frame.evaluate(generator.iter)

        def body(element: Value) -> None:
            attributes.assign(generator.target, element, frame)
            tests = [frame.evaluate(test) for test in generator.ifs]
            with frame.under(any(test.source >= Origin.TENSOR for test in tests)):
                level(depth + 1)

        return run_loop(iterable, body, frame)

    is_known = level(0) and len(generators) == len(results) == 1 and not generators[0].ifs
    frame.names = {name: frame.names.get(name, value) for name, value in outside.items()}
    return v.just(v.Sequence(tuple(made)) if is_known else v.Repeated(v.join(made)))


@v.handles(v.HANDLERS, ast.Tuple, ast.List, ast.Set)
def _sequence(node: ast.Tuple | ast.List | ast.Set, frame: Frame) -> Value:
    items: list[Value] = []
    for part in node.elts:
        value = frame.evaluate(part.value if isinstance(part, ast.Starred) else part)
        if not isinstance(part, ast.Starred):
            items.append(value)
        elif (
            len(value.atoms) == 1
            and not value.may_be_unknown
            and isinstance(inner := next(iter(value.atoms)), v.Sequence)
        ):
            items += inner.items
        else:
            rest = [frame.evaluate(other) for other in node.elts[len(items) :]]
            return v.just(v.Repeated(v.join([*items, attributes.item(value, v.PLAIN, frame), *rest])))
    return v.just(v.Sequence(tuple(items)))


@v.handles(v.HANDLERS, ast.Dict)
def _dict(node: ast.Dict, frame: Frame) -> Value:
    rows: dict[Any, Value] = {}
    loose: list[Value] = []
    for key, part in zip(node.keys, node.values, strict=True):
        value = frame.evaluate(part)
        name = frame.evaluate(key).constant() if key is not None else v.Unknown
        if isinstance(name, str | int):
            rows[name] = value
        else:
            loose.append(value)
    if loose:
        return Value(frozenset({v.Mapping((*rows.items(), (None, v.join(loose))))}), may_be_unknown=True)
    return v.just(v.Mapping(tuple(rows.items())))


@v.handles(v.HANDLERS, ast.JoinedStr)
def _f_string(node: ast.JoinedStr, frame: Frame) -> Value:
    values = [frame.evaluate(part.value if isinstance(part, ast.FormattedValue) else part) for part in node.values]
    objects = [value.constant() for value in values]
    together = v.opaque(*values)
    if all(isinstance(thing, str | int) for thing in objects):
        return v.known("".join(str(thing) for thing in objects))
    pattern = "".join(re.escape(str(thing)) if isinstance(thing, str | int) else ".*" for thing in objects)
    return together.replace(atoms=frozenset({v.Known(re.compile(pattern))}))


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


def combine(left: Value, right: Value, op: ast.operator, frame: Frame) -> Value:
    """Evaluate `left op right`: compute numbers, join lists; all other results are data."""
    one, other = left.constant(), right.constant()
    is_number = type(one) in (int, float) and type(other) in (int, float)
    if (is_number or type(one) is type(other) is str) and type(op) in _ARITHMETIC:
        try:
            if isinstance(one, str) or (abs(one) < 1e9 and abs(other) < 1e9):
                return v.known(_ARITHMETIC[type(op)](one, other))
        except (TypeError, ZeroDivisionError):
            return v.opaque(left, right)
    if isinstance(op, ast.Add | ast.Mult) and (_is_list(left) or _is_list(right)):
        return _join_lists([value for value in (left, right) if _is_list(value)], frame)
    result = v.opaque(frame.consume(left), frame.consume(right))
    result = frame.after("matmul", result, left, right) if isinstance(op, ast.MatMult) else result
    is_mask = isinstance(op, ast.BitAnd | ast.BitOr) or min(left.source, right.source) != Origin.TENSOR
    return result if is_mask or result.source != Origin.TENSOR_VALUE else result.replace(source=Origin.TENSOR)


def _is_list(value: Value) -> bool:
    lists = [isinstance(attributes.contents(atom), v.Sequence | v.Repeated) for atom in value.atoms]
    return bool(lists) and all(lists) and not value.may_be_unknown


def _join_lists(values: list[Value], frame: Frame) -> Value:
    sequences = [atom for value in values for atom in value.atoms if isinstance(atom, v.Sequence)]
    is_known = not any(value.may_be_unknown for value in values)
    if is_known and len(values) == 2 == len(sequences) == sum(len(value.atoms) for value in values):
        return v.just(v.Sequence(sequences[0].items + sequences[1].items))
    return v.just(v.Repeated(v.join(attributes.item(value, v.PLAIN, frame) for value in values)))


@v.handles(v.HANDLERS, ast.UnaryOp)
def _unary(node: ast.UnaryOp, frame: Frame) -> Value:
    value = frame.evaluate(node.operand)
    if isinstance(node.op, ast.Not):
        answer = attributes.truth(value)
        return v.PLAIN.replace(source=value.source) if answer is None else v.known(not answer)
    number = value.constant()
    if isinstance(node.op, ast.USub) and type(number) in (int, float):
        return v.known(-number)
    return frame.consume(value)


@v.handles(v.HANDLERS, ast.BoolOp)
def _boolean(node: ast.BoolOp, frame: Frame) -> Value:
    """`a and b` stops at the first operand that decides the result."""
    stops_at = isinstance(node.op, ast.Or)
    values = []
    for part in node.values:
        value = frame.evaluate(part)
        answer = attributes.truth(value)
        if answer is stops_at:
            return value if not values or not stops_at else v.join([*values, value])
        if answer is None or part is node.values[-1]:
            values.append(value)
    return v.join(values)


@v.handles(v.HANDLERS, ast.Compare)
def _compare(node: ast.Compare, frame: Frame) -> Value:
    left = frame.evaluate(node.left)
    results = []
    for op, part in zip(node.ops, node.comparators, strict=True):
        right = frame.evaluate(part)
        results.append(_compare_two(left, op, right, frame))
        left = right
    return results[0] if len(results) == 1 else v.opaque(*results)


def _compare_two(left: Value, op: ast.cmpop, right: Value, frame: Frame) -> Value:
    one, other = left.constant(), right.constant()
    if isinstance(op, ast.Is | ast.IsNot):
        answer = _same_object(left, right)
        return v.PLAIN if answer is None else v.known(answer is isinstance(op, ast.Is))
    if left.source == Origin.RANDOM and isinstance(op, ast.Lt | ast.LtE) and other in (0, 0.0) and other is not False:
        return v.known(False)  # layerdrop is off
    if isinstance(one, _SIMPLE) and isinstance(other, _SIMPLE):
        try:
            return v.known(bool(_COMPARISON[type(op)](one, other)))
        except (TypeError, KeyError):
            return v.PLAIN
    if isinstance(op, ast.In | ast.NotIn) and isinstance(one, _SIMPLE):
        members = _constants(right)
        if members is not None:
            return v.known((one in members) is isinstance(op, ast.In))
    else:
        frame.consume(left)
        frame.consume(right)
    result = v.opaque(left, right)
    return result.replace(source=Origin.TENSOR_VALUE) if result.source >= Origin.TENSOR else result


def _constants(value: Value) -> list[Any] | None:
    """Return the items of a list of constants, from the code or a real object."""
    held = attributes.contents(next(iter(value.atoms))) if len(value.atoms) == 1 and not value.may_be_unknown else None
    if not isinstance(held, v.Sequence | v.Mapping):
        return None
    is_list = isinstance(held, v.Sequence)
    members = [inner.constant() for inner in held.items] if is_list else [key for key, _ in held.items]
    return members if all(isinstance(thing, _SIMPLE) for thing in members) else None


def _same_object(left: Value, right: Value) -> bool | None:
    one, other = left.constant(), right.constant()
    if one is not v.Unknown and other is not v.Unknown:
        return one is other
    for value, thing in ((left, other), (right, one)):
        if thing is None and not value.may_be_unknown and value.atoms and v.Known(None) not in value.atoms:
            return False
    return None


@v.handles(v.HANDLERS, ast.IfExp)
def _conditional(node: ast.IfExp, frame: Frame) -> Value:
    test = frame.evaluate(node.test)
    answer = attributes.truth(test)
    if answer is not None:
        return frame.evaluate(node.body if answer else node.orelse)
    depends = test.source >= Origin.TENSOR
    with frame.under(depends):
        result = v.join([frame.evaluate(node.body), frame.evaluate(node.orelse)])
    return result.replace(data_dependent=result.data_dependent or (depends and len(result.atoms) > 1))


@v.handles(v.HANDLERS, ast.Slice)
def _slice(node: ast.Slice, frame: Frame) -> Value:
    bounds = [frame.evaluate(part) if part is not None else v.NONE for part in (node.lower, node.upper, node.step)]
    numbers = [bound.constant() for bound in bounds]
    if all(number is None or type(number) is int for number in numbers):
        return v.known(slice(*numbers))
    return Value(frozenset({v.Known(slice)}), may_be_unknown=True, source=max(bound.source for bound in bounds))


_GROWING = ("append", "extend", "insert", "add", "appendleft")
_FROM_LIKENESS = {"to", "type_as", "view_as", "expand_as", "reshape_as", "is_same_size"}
"""Methods that only read the dtype and shape of their argument, as in `x.to(weight)`."""


@v.handles(v.HANDLERS, ast.Call)
def _call(node: ast.Call, frame: Frame) -> Value:
    if not isinstance(node.func, ast.Attribute):
        return invoke(frame.evaluate(node.func), evaluate_arguments(node, frame), frame)
    receiver = frame.evaluate(node.func.value)
    name = node.func.attr
    arguments = evaluate_arguments(node, frame)
    if isinstance(node.func.value, ast.Name) and name in _GROWING:
        return _grow(node.func.value.id, receiver, name, arguments.positional, frame)
    found = container_method(receiver, name, arguments, frame)
    if found is not None:
        return found
    tensors = frozenset(a for a in receiver.atoms if isinstance(a, v.Known) and isinstance(a.object, torch.Tensor))
    rest = receiver.replace(atoms=receiver.atoms - tensors)
    results = []
    if tensors:
        if attributes.method_reads_content(name):
            frame.consume(receiver.replace(atoms=tensors))
        made = attributes.method_result(Value(may_be_unknown=True, source=Origin.TENSOR), name, arguments)
        results.append(_after_method(made, receiver, name, arguments, frame))
    if rest.atoms:
        results.append(invoke(attributes.load(rest.replace(may_be_unknown=False), name, frame), arguments, frame))
    if receiver.may_be_unknown or not receiver.atoms or tensors:
        if name not in _FROM_LIKENESS and not rest.atoms:
            hand_over(arguments, frame, name=name)
        made = attributes.method_result(receiver, name, arguments)
        results.append(_after_method(made, receiver, name, arguments, frame))
    return v.join(results)


def _after_method(result: Value, receiver: Value, name: str, arguments: Arguments, frame: Frame) -> Value:
    """Return the result of a tensor method; the result of a size query has an empty trail."""
    if name in attributes.SIZE_METHODS:
        frame.note_size_read(receiver)
        return result.replace(trail=frozenset())
    return frame.after(name, result, receiver, *arguments.values(), sizes=arguments.flat())


def _grow(name: str, receiver: Value, how: str, values: list[Value], frame: Frame) -> Value:
    """`blocks.append(block)`: the list may have one more item after this."""
    added = values[-1] if values else v.PLAIN
    if not added.atoms and not any(isinstance(atom, v.Sequence | v.Repeated) for atom in receiver.atoms):
        return v.NONE
    added = v.just(v.Sequence((added,))) if how != "extend" else added
    grown = _join_lists([receiver, added], frame)
    home: Frame | None = frame
    while home is not None and name not in home.names:
        home = home.outer
    (home or frame).names[name] = grown
    return v.NONE


@v.handles(v.HANDLERS, ast.NamedExpr)
def _walrus(node: ast.NamedExpr, frame: Frame) -> Value:
    value = frame.evaluate(node.value)
    frame.names[node.target.id] = value
    return value


@v.handles(v.HANDLERS, ast.Yield, ast.YieldFrom)
def _yield(node: ast.Yield | ast.YieldFrom, frame: Frame) -> Value:
    value = frame.evaluate(node.value) if node.value is not None else v.NONE
    frame.yields.append(attributes.item(value, v.PLAIN, frame) if isinstance(node, ast.YieldFrom) else value)
    return v.PLAIN


@v.handles(v.HANDLERS, ast.Assign, ast.AnnAssign)
def _assign(node: ast.Assign | ast.AnnAssign, frame: Frame) -> None:
    if node.value is not None:
        value = frame.evaluate(node.value)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            attributes.assign(target, value, frame)


@v.handles(v.HANDLERS, ast.AugAssign)
def _augmented(node: ast.AugAssign, frame: Frame) -> None:
    added = frame.evaluate(node.value)
    target = frame.evaluate(node.target)
    value = combine(target, added, node.op, frame)
    if isinstance(node.target, ast.Name):
        frame.names[node.target.id] = value


@v.handles(v.HANDLERS, ast.Return)
def _return(node: ast.Return, frame: Frame) -> None:
    frame.returns.append(frame.evaluate(node.value) if node.value is not None else v.NONE)
    frame.exit_counts.append(frame.analysis.counts)
    frame.dead = "jump"


@v.handles(v.HANDLERS, ast.Continue, ast.Break)
def _jump(node: ast.stmt, frame: Frame) -> None:
    frame.jumps.append((dict(frame.names), dict(frame.analysis.counts)))
    frame.dead = "jump"


@v.handles(v.HANDLERS, ast.Raise)
def _raise(node: ast.Raise, frame: Frame) -> None:
    frame.dead = "raise"


@v.handles(v.HANDLERS, ast.If)
def _if(node: ast.If, frame: Frame) -> None:
    test = frame.evaluate(node.test)
    answer = attributes.truth(test)
    if answer is not None:
        frame.execute(node.body if answer else node.orelse)
        return
    depends = test.source >= Origin.TENSOR
    _branches([node.body, node.orelse], frame, depends=depends)


def _branches(bodies: list[list[ast.stmt]], frame: Frame, *, depends: bool) -> None:
    """Run alternatives from the same state and join the states of those that continue."""
    names, counts = frame.names, frame.analysis.counts
    ends: list[tuple[dict[str, Value], dict[str, int], str]] = []
    for body in bodies:
        frame.names, frame.analysis.counts = dict(names), dict(counts)
        with frame.under(depends):
            frame.execute(body)
        ends.append((frame.names, frame.analysis.counts, frame.dead))
        frame.dead = ""
    going_on = [end for end in ends if not end[2]]
    jumped = any(end[2] == "jump" for end in ends)
    if going_on:
        frame.names = v.join_names([end[0] for end in going_on])
        frame.analysis.counts = v.join_counts([end[1] for end in going_on])
        frame.skipping = frame.skipping or (depends and jumped)
    else:
        frame.dead = "jump" if jumped else "raise"


@v.handles(v.HANDLERS, ast.For, ast.AsyncFor)
def _for(node: ast.For, frame: Frame) -> None:
    iterable = frame.evaluate(node.iter)

    def body(element: Value) -> None:
        attributes.assign(node.target, element, frame)
        frame.execute(node.body)

    run_loop(iterable, body, frame)
    frame.execute(node.orelse)


@v.handles(v.HANDLERS, ast.While)
def _while(node: ast.While, frame: Frame) -> None:
    def body(_: Value) -> None:
        test = frame.evaluate(node.test)
        with frame.under(test.source >= Origin.TENSOR):
            frame.execute(node.body)

    run_loop(None, body, frame)
    frame.execute(node.orelse)


@v.handles(v.HANDLERS, ast.With, ast.AsyncWith)
def _with(node: ast.With, frame: Frame) -> None:
    for managed in node.items:
        value = frame.evaluate(managed.context_expr)
        if managed.optional_vars is not None:
            attributes.assign(managed.optional_vars, value, frame)
    frame.execute(node.body)


@v.handles(v.HANDLERS, ast.Try, ast.TryStar)
def _try(node: ast.Try, frame: Frame) -> None:
    _branches([[*node.body, *node.orelse], *([*handler.body] for handler in node.handlers)], frame, depends=False)
    dead = frame.dead
    frame.dead = ""
    frame.execute(node.finalbody)
    frame.dead = frame.dead or dead


@v.handles(v.HANDLERS, ast.Match)
def _match(node: ast.Match, frame: Frame) -> None:
    subject = frame.evaluate(node.subject)
    for case in node.cases:
        for pattern in ast.walk(case.pattern):
            name = getattr(pattern, "name", None)
            if isinstance(name, str):
                frame.names[name] = v.PLAIN.replace(source=subject.source)
    _branches([*(case.body for case in node.cases), []], frame, depends=subject.source >= Origin.TENSOR)


@v.handles(v.HANDLERS, ast.FunctionDef, ast.AsyncFunctionDef)
def _function(node: ast.FunctionDef, frame: Frame) -> None:
    frame.names[node.name] = v.just(v.Closure(node, frame))


@v.handles(v.HANDLERS, ast.Import)
def _import(node: ast.Import, frame: Frame) -> None:
    for alias in node.names:
        module = sys.modules.get(alias.name if alias.asname else alias.name.split(".")[0])
        frame.names[alias.asname or alias.name.split(".")[0]] = v.known(module) if module is not None else v.PLAIN


@v.handles(v.HANDLERS, ast.ImportFrom)
def _import_from(node: ast.ImportFrom, frame: Frame) -> None:
    package = (frame.function.__globals__.get("__package__") or "") if frame.function is not None else ""
    base = package.rsplit(".", node.level - 1)[0] if node.level else ""
    source = ".".join(part for part in (base, node.module or "") if part)
    names = vars(sys.modules[source]) if source in sys.modules else {}
    for alias in node.names:
        frame.names[alias.asname or alias.name] = v.known(names[alias.name]) if alias.name in names else v.PLAIN


v.HANDLERS |= {
    ast.BinOp: lambda node, frame: combine(frame.evaluate(node.left), frame.evaluate(node.right), node.op, frame),
    ast.Constant: lambda node, frame: v.known(node.value),
    ast.Name: lambda node, frame: frame.lookup(node.id),
    ast.Attribute: lambda node, frame: attributes.load(frame.evaluate(node.value), node.attr, frame),
    ast.Subscript: lambda node, frame: attributes.item(frame.evaluate(node.value), frame.evaluate(node.slice), frame),
    ast.Starred: lambda node, frame: attributes.item(frame.evaluate(node.value), v.PLAIN, frame),
    ast.Lambda: lambda node, frame: v.just(v.Closure(node, frame)),
    ast.Await: lambda node, frame: frame.evaluate(node.value),
    ast.ListComp: lambda node, frame: comprehension(node.generators, [node.elt], frame),
    ast.SetComp: lambda node, frame: comprehension(node.generators, [node.elt], frame),
    ast.GeneratorExp: lambda node, frame: comprehension(node.generators, [node.elt], frame),
    ast.DictComp: lambda node, frame: comprehension(node.generators, [node.key, node.value], frame),
    ast.Expr: lambda node, frame: frame.evaluate(node.value),
    ast.Assert: lambda node, frame: frame.evaluate(node.test),
    ast.ClassDef: lambda node, frame: frame.names.update({node.name: v.PLAIN}),
}
