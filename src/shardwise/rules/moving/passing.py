"""Which functions of a program are handed a wrapped model by a caller, in their own module or another."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.errors import SourceError
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.sharded import Holds
from shardwise.rules.scopes import Function
from shardwise.rules.source import FileContext

Parameters = dict[str, set[tuple[int, str]]]
"""By path, the line of a function and the name of its parameter that may hold a wrapped model."""
_MAX_ROUNDS = 4  # main() -> train() -> save() -> write()


def spread(program: Program, found: Parameters) -> None:
    """Fill `found`, which `Sharded` reads while it is being filled: what one round finds, the next one follows."""
    paths = {path for path, text in program.texts.items() if "FSDP" in text or "FullyShardedDataParallel" in text}
    for _ in range(_MAX_ROUNDS):
        fresh: Parameters = {}
        for path in sorted(paths):
            for other, parameter in _handed_on(program, path):
                if parameter not in found.get(other, set()):
                    fresh.setdefault(other, set()).add(parameter)
        if not fresh:
            return
        for path, parameters in fresh.items():
            found.setdefault(path, set()).update(parameters)
            program.forget(path)
        paths = set(fresh)


def _handed_on(program: Program, path: str) -> Iterator[tuple[str, tuple[int, str]]]:
    try:
        context = program.file(path)
    except SourceError:
        return
    sharded = program.sharded(context)
    if not sharded.has_any:
        return
    for call in context.calls:
        if call in sharded.constructors:
            continue
        given = [(index, one) for index, one in enumerate(call.args)] + [(kw.arg, kw.value) for kw in call.keywords]
        wrapped = [place for place, one in given if _may_be(one) and sharded.holds(one) is not Holds.NEVER]
        target = _target(program, context, call.func) if wrapped else None
        if target is None:
            continue
        other, function, skipped = target
        names = [one.arg for one in [*function.args.posonlyargs, *function.args.args]][skipped:]
        named = {*names, *(one.arg for one in function.args.kwonlyargs)}
        for place in wrapped:
            name = (
                place if isinstance(place, str) else names[place] if place is not None and place < len(names) else None
            )
            if name in named:
                yield other.path, (function.lineno, str(name))


def _may_be(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))


def _target(program: Program, context: FileContext, node: ast.expr) -> tuple[FileContext, Function, int] | None:
    """The function that a call enters, and how many of its parameters the call does not give (`self`)."""
    found = program.function(context, node)
    if found is not None:
        return *found, 0
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        owner = context.enclosing_class(node)
        method = _method(owner, node.attr) if owner is not None else None
        return (context, method, 1) if method is not None else None
    made = program.definition(context, node)
    if made is not None and isinstance(made[1], ast.ClassDef):
        method = _method(made[1], "__init__")
        return (made[0], method, 1) if method is not None else None
    return None


def _method(owner: ast.ClassDef, name: str) -> Function | None:
    return next((one for one in owner.body if isinstance(one, Function) and one.name == name), None)
