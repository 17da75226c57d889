"""How each kind of Python statement is run."""

import ast
import sys

from shardwise.planning.source import displays, expressions, operators
from shardwise.planning.source.frames import Frame, evaluate, execute, join_counts, join_names, statement
from shardwise.planning.source.loops import run_loop
from shardwise.planning.source.operators import combine
from shardwise.planning.source.targets import assign
from shardwise.planning.source.truth import truth
from shardwise.planning.source.values import NONE, PLAIN, Closure, Source, Value, known

EXPRESSIONS_IN = (displays, expressions, operators)
"""Importing them fills the table of expressions; without it the reader would take nothing in."""


@statement(ast.Expr)
def _expr(node: ast.Expr, frame: Frame) -> None:
    evaluate(node.value, frame)


@statement(ast.Assign)
def _assign(node: ast.Assign, frame: Frame) -> None:
    value = evaluate(node.value, frame)
    for target in node.targets:
        assign(target, value, frame)


@statement(ast.AnnAssign)
def _annotated(node: ast.AnnAssign, frame: Frame) -> None:
    if node.value is not None:
        assign(node.target, evaluate(node.value, frame), frame)


@statement(ast.AugAssign)
def _augmented(node: ast.AugAssign, frame: Frame) -> None:
    added = evaluate(node.value, frame)
    target = evaluate(node.target, frame)
    value = combine(target, added, node.op, frame)
    if isinstance(node.target, ast.Name):
        frame.names[node.target.id] = value


@statement(ast.Return)
def _return(node: ast.Return, frame: Frame) -> None:
    frame.returns.append(evaluate(node.value, frame) if node.value is not None else NONE)
    frame.exit_counts.append(frame.analysis.counts)
    frame.dead = "jump"


@statement(ast.Continue, ast.Break)
def _jump(node: ast.stmt, frame: Frame) -> None:
    frame.jumps.append((dict(frame.names), dict(frame.analysis.counts)))
    frame.dead = "jump"


@statement(ast.Raise)
def _raise(node: ast.Raise, frame: Frame) -> None:
    frame.dead = "raise"


@statement(ast.If)
def _if(node: ast.If, frame: Frame) -> None:
    test = evaluate(node.test, frame)
    answer = truth(test)
    if answer is not None:
        frame.analysis.decide(test)
        execute(node.body if answer else node.orelse, frame)
        return
    depends = test.source >= Source.TENSOR
    _branches([node.body, node.orelse], frame, depends=depends)


def _branches(bodies: list[list[ast.stmt]], frame: Frame, *, depends: bool) -> None:
    """Run alternatives from the same start and let those that go on meet again."""
    names, counts = frame.names, frame.analysis.counts
    ends: list[tuple[dict[str, Value], dict[int, int], str]] = []
    for body in bodies:
        frame.names, frame.analysis.counts = dict(names), dict(counts)
        with frame.under(depends):
            execute(body, frame)
        ends.append((frame.names, frame.analysis.counts, frame.dead))
        frame.dead = ""
    going_on = [end for end in ends if not end[2]]
    jumped = any(end[2] == "jump" for end in ends)
    if going_on:
        frame.names = join_names([end[0] for end in going_on])
        frame.analysis.counts = join_counts([end[1] for end in going_on])
        frame.skipping = frame.skipping or (depends and jumped)
    else:
        frame.dead = "jump" if jumped else "raise"


@statement(ast.For, ast.AsyncFor)
def _for(node: ast.For, frame: Frame) -> None:
    iterable = evaluate(node.iter, frame)

    def body(element: Value) -> None:
        assign(node.target, element, frame)
        execute(node.body, frame)

    run_loop(iterable, body, frame)
    execute(node.orelse, frame)


@statement(ast.While)
def _while(node: ast.While, frame: Frame) -> None:
    def body(_: Value) -> None:
        test = evaluate(node.test, frame)
        with frame.under(test.source >= Source.TENSOR):
            execute(node.body, frame)

    run_loop(None, body, frame)
    execute(node.orelse, frame)


@statement(ast.With, ast.AsyncWith)
def _with(node: ast.With, frame: Frame) -> None:
    for item in node.items:
        value = evaluate(item.context_expr, frame)
        if item.optional_vars is not None:
            assign(item.optional_vars, value, frame)
    execute(node.body, frame)


@statement(ast.Try, ast.TryStar)
def _try(node: ast.Try, frame: Frame) -> None:
    _branches([[*node.body, *node.orelse], *([*handler.body] for handler in node.handlers)], frame, depends=False)
    dead = frame.dead
    frame.dead = ""
    execute(node.finalbody, frame)
    frame.dead = frame.dead or dead


@statement(ast.Match)
def _match(node: ast.Match, frame: Frame) -> None:
    subject = evaluate(node.subject, frame)
    for case in node.cases:
        for pattern in ast.walk(case.pattern):
            name = getattr(pattern, "name", None)
            if isinstance(name, str):
                frame.names[name] = PLAIN.like(source=subject.source)
    _branches([*(case.body for case in node.cases), []], frame, depends=subject.source >= Source.TENSOR)


@statement(ast.FunctionDef, ast.AsyncFunctionDef)
def _function(node: ast.FunctionDef, frame: Frame) -> None:
    frame.names[node.name] = Value(frozenset({Closure(node, frame)}))


@statement(ast.ClassDef)
def _class(node: ast.ClassDef, frame: Frame) -> None:
    frame.names[node.name] = PLAIN


@statement(ast.Import)
def _import(node: ast.Import, frame: Frame) -> None:
    for alias in node.names:
        module = sys.modules.get(alias.name if alias.asname else alias.name.split(".")[0])
        frame.names[alias.asname or alias.name.split(".")[0]] = known(module) if module is not None else PLAIN


@statement(ast.ImportFrom)
def _import_from(node: ast.ImportFrom, frame: Frame) -> None:
    package = (frame.function.__globals__.get("__package__") or "") if frame.function is not None else ""
    base = package.rsplit(".", node.level - 1)[0] if node.level else ""
    source = ".".join(part for part in (base, node.module or "") if part)
    names = vars(sys.modules[source]) if source in sys.modules else {}
    for alias in node.names:
        frame.names[alias.asname or alias.name] = known(names[alias.name]) if alias.name in names else PLAIN


@statement(ast.Assert)
def _assert(node: ast.Assert, frame: Frame) -> None:
    evaluate(node.test, frame)
