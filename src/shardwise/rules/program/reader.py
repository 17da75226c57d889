"""From a file to its traces: the main program, then every function and class that it does not reach."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import suppress

from shardwise.rules.program.events import Trace
from shardwise.rules.program.statements import read_block, read_body
from shardwise.rules.program.values import Env, Thing, Values
from shardwise.rules.program.walk import OutOfBudget, Walk
from shardwise.rules.scopes import Function, all_parameters
from shardwise.rules.source import FileContext


def read_program(file: FileContext) -> list[Trace]:
    """The traces of a file; each event happens in exactly one of them, except in functions called several times."""
    main = Walk(file, file.tree, {})
    main.env = main.module_env  # at module level they are the same
    _run(lambda: read_block(main, file.tree.body))
    traces, reached = [main.trace], set(main.reached)
    for functions in _roots(file):
        unreached = [function for function in functions if function not in reached]
        if unreached:
            walk = Walk(file, unreached[0], main.module_env)
            # A method that another of its class calls is read there, with its arguments.
            for function in unreached:
                if function not in walk.reached:
                    _run_function(walk, function)
            traces.append(walk.trace)
            reached |= walk.reached
    return [trace for trace in traces if trace.events]


def _roots(file: FileContext) -> Iterator[list[Function]]:
    """Functions to start from: methods of one class together, callers before those they call."""
    for node in file.tree.body:
        if isinstance(node, ast.ClassDef):
            methods = [one for one in node.body if isinstance(one, Function)]
            yield sorted(
                methods, key=lambda method: (method.name not in ("__init__", "setup"), _num_callers(file, method))
            )
    tops = [one for one in file.functions if not isinstance(file.parents[one], ast.ClassDef | Function)]
    for function in sorted(tops, key=lambda one: (_num_callers(file, one), one.lineno)):
        yield [function]


def _num_callers(file: FileContext, function: Function) -> int:
    """How often the file calls something of this name: what nobody calls is read first."""
    return sum(_called_name(call) == function.name for call in file.calls)


def _called_name(call: ast.Call) -> str:
    return getattr(call.func, "id", "") or getattr(call.func, "attr", "")


def _run_function(walk: Walk, function: Function) -> None:
    walk.root = function
    owner = walk.file.parents[function]
    env: Env = {one.arg: frozenset({Thing(one)}) for one in all_parameters(function.args)}
    positional = [*function.args.posonlyargs, *function.args.args]
    if isinstance(owner, ast.ClassDef) and positional:
        env[positional[0].arg] = self_of(owner)
    walk.env = env
    walk.reached.add(function)
    _run(lambda: read_body(walk, function))


def self_of(owner: ast.ClassDef) -> Values:
    """The object that all methods of a class share."""
    return frozenset({Thing(owner, definition=owner)})


def _run(read: Callable[[], object]) -> None:
    with suppress(OutOfBudget):
        read()
