"""Reading statements in order: branches one after the other, loops once, functions where they are called."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from shardwise.rules.program.expressions import evaluate, turns
from shardwise.rules.program.facts import makes_meta
from shardwise.rules.program.values import UNKNOWN, Code, Entry, Part, Row, Table, Thing, Values, join
from shardwise.rules.program.walk import ITEM, Walk, merge
from shardwise.rules.scopes import Function


def read_block(walk: Walk, statements: Sequence[ast.stmt]) -> bool:
    """Read statements; True when control never reaches their end."""
    length = len(walk.guards)
    try:
        return any(read_statement(walk, statement) for statement in statements)
    finally:
        del walk.guards[length:]


def read_statement(walk: Walk, statement: ast.stmt) -> bool:
    """Read one statement; True when control does not go past it."""
    match statement:
        case ast.Return():
            walk.returned.append(evaluate(walk, statement.value) if statement.value else UNKNOWN)
            return True
        case ast.Raise() | ast.Continue() | ast.Break():
            _evaluate_all(walk, statement)
            return True
        case ast.If():
            return _branch(walk, statement)
        case ast.For() | ast.AsyncFor():
            _loop(walk, statement)
        case ast.While():
            evaluate(walk, statement.test)
            _body_of_loop(walk, statement)
            read_block(walk, statement.orelse)
        case ast.With() | ast.AsyncWith():
            return _with(walk, statement)
        case ast.Try() | ast.TryStar():
            return _try(walk, statement)
        case ast.Match():
            _match(walk, statement)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            nested = walk.env if walk.active else None
            walk.env[statement.name] = frozenset({Code(statement, env=nested)})
        case ast.ClassDef():
            walk.env.pop(statement.name, None)
        case ast.Assign():
            values = evaluate(walk, statement.value)
            for target in statement.targets:
                assign(walk, target, values)
        case ast.AnnAssign():
            if statement.value is not None:
                assign(walk, statement.target, evaluate(walk, statement.value))
        case ast.AugAssign():
            evaluate(walk, statement.value)
            if isinstance(statement.target, ast.Name):
                walk.env[statement.target.id] = UNKNOWN
        case ast.Import() | ast.ImportFrom() | ast.Global() | ast.Nonlocal() | ast.Pass():
            pass
        case _:
            _evaluate_all(walk, statement)
    return False


def _evaluate_all(walk: Walk, statement: ast.stmt) -> None:
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            evaluate(walk, child)


def _branch(walk: Walk, statement: ast.If) -> bool:
    evaluate(walk, statement.test)
    before = dict(walk.env)
    with walk.guarded(statement.test, True):
        body_ends = read_block(walk, statement.body)
    after_body, walk.env = walk.env, before
    with walk.guarded(statement.test, False):
        else_ends = read_block(walk, statement.orelse)
    if body_ends and not else_ends:
        walk.assume(statement.test, False)  # `if x: return`: what follows is the other branch
    elif else_ends and not body_ends:
        walk.assume(statement.test, True)
        walk.env = after_body
    else:
        walk.env = merge(after_body, walk.env)
    return body_ends and else_ends


def _loop(walk: Walk, statement: ast.For | ast.AsyncFor) -> None:
    values = evaluate(walk, statement.iter)
    for element in walk.unroll(turns(walk, values)):
        assign(walk, statement.target, element)
        _body_of_loop(walk, statement)
    read_block(walk, statement.orelse)


def _body_of_loop(walk: Walk, statement: ast.For | ast.AsyncFor | ast.While) -> None:
    before = dict(walk.env)
    walk.loops.append(statement)
    read_block(walk, statement.body)
    walk.loops.pop()
    walk.env = merge(before, walk.env)


def _with(walk: Walk, statement: ast.With | ast.AsyncWith) -> bool:
    length, metas = len(walk.contexts), walk.meta_depth
    for item in statement.items:
        before = len(walk.trace.events)
        values = evaluate(walk, item.context_expr)
        walk.contexts.extend(walk.trace.events[before:])
        walk.meta_depth += any(makes_meta(event) for event in walk.trace.events[before:])
        if item.optional_vars is not None:
            assign(walk, item.optional_vars, values)
    ends = read_block(walk, statement.body)
    walk.meta_depth = metas
    del walk.contexts[length:]
    return ends


def _try(walk: Walk, statement: ast.Try | ast.TryStar) -> bool:
    before = dict(walk.env)
    ends = read_block(walk, [*statement.body, *statement.orelse])
    after = walk.env
    for handler in statement.handlers:
        walk.env = merge(before, after)
        with walk.guarded(handler, True):
            if not read_block(walk, handler.body):
                after = merge(after, walk.env)
                ends = False
    walk.env = after
    return read_block(walk, statement.finalbody) or ends


def _match(walk: Walk, statement: ast.Match) -> None:
    evaluate(walk, statement.subject)
    before, after = dict(walk.env), dict(walk.env)
    for case in statement.cases:
        walk.env = dict(before)
        test = ast.Compare(left=statement.subject, ops=[ast.Eq()], comparators=[_pattern(case.pattern)])
        ast.copy_location(test, statement.subject)
        with walk.guarded(test, True):
            read_block(walk, case.body)
        after = merge(after, walk.env)
    walk.env = after


def _pattern(pattern: ast.pattern) -> ast.expr:
    if isinstance(pattern, ast.MatchValue):
        return pattern.value
    return ast.Constant(value=f"pattern {pattern.lineno}:{pattern.col_offset}")  # equal to no other


def assign(walk: Walk, target: ast.expr, values: Values) -> None:
    """Bind a target to values, element by element where both sides show them."""
    match target:
        case ast.Name():
            walk.env[target.id] = values
        case ast.Starred():
            assign(walk, target.value, UNKNOWN)
        case ast.Tuple() | ast.List():
            for position, element in enumerate(target.elts):
                assign(walk, element, _element(walk, values, position, len(target.elts)))
        case ast.Attribute():
            owners = evaluate(walk, target.value)
            walk.emit(target, receiver=owners, method=target.attr, args=(values,))
            for owner in owners:
                if isinstance(owner, Thing | Part):
                    walk.store(owner, target.attr, values)
        case ast.Subscript():
            _assign_item(walk, target, values)


def _element(walk: Walk, values: Values, position: int, count: int) -> Values:
    rows = [value for value in values if isinstance(value, Row)]
    if rows and all(len(row.items) == count for row in rows):
        return join(*(row.items[position] for row in rows))
    things = frozenset(value for value in values if isinstance(value, Thing))
    return frozenset(Part(thing, (f"[{position}]",)) for thing in things)


def _assign_item(walk: Walk, target: ast.Subscript, values: Values) -> None:
    owners = evaluate(walk, target.value)
    evaluate(walk, target.slice)
    key = target.slice.value if isinstance(target.slice, ast.Constant) else None
    tables = [value for value in owners if isinstance(value, Table)]
    if tables:
        entry = Entry(key, values, target) if isinstance(key, str) else None
        filled = frozenset(
            Table((*table.entries, *([entry] if entry else [])), table.is_open or entry is None) for table in tables
        )
        holder = target.value.value if isinstance(target.value, ast.Attribute) else None
        walk.rebind(target.value, filled, evaluate(walk, holder) if holder is not None else UNKNOWN)
    for owner in owners:
        if isinstance(owner, Thing | Part):
            walk.store(owner, ITEM, values)


def read_body(walk: Walk, function: Function) -> Values:
    """Read a function's body in the names set up for it; what it returns."""
    outer, walk.returned = walk.returned, []
    guards, loops = len(walk.guards), len(walk.loops)
    walk.active.append(function)
    try:
        read_block(walk, function.body)
        return join(*walk.returned)
    finally:
        walk.active.pop()
        walk.returned = outer
        del walk.guards[guards:], walk.loops[loops:]
