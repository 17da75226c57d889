"""Rules about the order of `fully_shard` calls: children before parents, each module once."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.findings import Severity
from shardwise.rules.program import facts
from shardwise.rules.program.conditions import tested_classes
from shardwise.rules.program.usage import Shard, Usage
from shardwise.rules.program.values import Thing
from shardwise.rules.registry import Hit, Reading, rule


@rule("SW203", "parent-before-child", severity=Severity.ERROR)
def parent_before_child(reading: Reading) -> Iterator[Hit]:
    """`fully_shard` on a parent before its child leaves the child nothing to shard.

    Why: each call takes the parameters that no earlier call took; children go first, the root last.
    Symptom: `TypeError: Invariant encountered: value was None when it should not be`.
    """
    for usage in reading.usages:
        for child in usage.shards:
            for parent in usage.shards:
                if usage.trace.is_part_of(child.subject, parent.subject) and _goes_first(usage, parent, child):
                    yield Hit(
                        node=child.event.node,
                        message=f"the module around this one is already sharded (line {parent.event.node.lineno})",
                        fix="shard children first, then the modules around them, the root last",
                    )
                    break
        for shard in usage.shards:
            reason = _parents_come_first(reading, shard)
            if reason:
                yield Hit(
                    node=shard.event.node,
                    message=f"modules() gives parents before their children, {reason}",
                    fix="loop over reversed(list(model.modules())), or over the blocks themselves",
                )


def _goes_first(usage: Usage, parent: Shard, child: Shard) -> bool:
    if parent.is_automatic or getattr(parent.subject, "origins", frozenset()) & facts.LISTS:
        return False  # shardwise knows the order; a list of modules is refused, and SW205 says so
    return usage.trace.precedes(parent.event, child.event)


def _parents_come_first(reading: Reading, shard: Shard) -> str:
    """Why a loop over `modules()` meets a module that is to be sharded before one inside it; else nothing."""
    loop = shard.event.loop
    path = getattr(shard.subject, "path", ())
    if loop is None or not path or path[-1] != "modules()" or not isinstance(loop, ast.For):
        return ""
    called = {
        getattr(node.func, "attr", getattr(node.func, "id", ""))
        for node in ast.walk(loop.iter)
        if isinstance(node, ast.Call)
    }
    if "reversed" in called or not called & {"modules", "named_modules"}:
        return ""  # the second: modules chosen before, one cannot see by what
    inside = [guard for guard in shard.event.guards if loop.lineno <= guard.test.lineno <= (loop.end_lineno or 0)]
    if not inside:
        return "and every one of them is sharded"
    names = {name for guard in inside if guard.taken for name in tested_classes(reading.file, guard.test)}
    if len(inside) != 1 or len(names) < 2:
        return ""
    for outer in names:
        for inner in names - {outer}:
            if _contains(reading, outer, inner):
                return f"and {outer} contains {inner}"
    return ""


def _contains(reading: Reading, outer: str, inner: str) -> bool:
    if (outer, inner) in facts.NESTED:
        return True
    definition = reading.file.classes.get(outer)
    return definition is not None and any(
        isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == inner
        for node in ast.walk(definition)
    )


@rule("SW204", "sharded-twice", severity=Severity.ERROR)
def sharded_twice(reading: Reading) -> Iterator[Hit]:
    """A module can be given to `fully_shard` only once.

    Why: the first call has already replaced its parameters and installed its hooks.
    Symptom: `fully_shard has already been applied to the module`.
    """
    for usage in reading.usages:
        for second in usage.shards:
            for first in usage.shards:
                if (
                    first.subject == second.subject
                    and usage.trace.precedes(first.event, second.event)
                    and _is_one_module(reading, first, second)
                ):
                    yield Hit(
                        node=second.event.node,
                        message=f"this module is already sharded (line {first.event.node.lineno})",
                        fix="remove one of the two calls",
                    )
                    break
            if _is_in_a_loop_of_its_own(second):
                yield Hit(
                    node=second.event.node,
                    message="every turn of the loop shards the same module",
                    fix="shard it once, before the loop",
                )


def _is_in_a_loop_of_its_own(shard: Shard) -> bool:
    """Whether a loop of the same function repeats the call for a module that was made before the loop."""
    loop, subject = shard.event.loop, shard.subject
    (argument, *_) = (*_first_arguments(shard), None)
    if not (isinstance(loop, ast.For) and isinstance(subject, Thing) and isinstance(argument, ast.Name)):
        return False
    inside = list(ast.walk(loop))
    stored = {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    ends = any(isinstance(node, ast.Break | ast.Return) for node in inside)
    return shard.event.node in inside and subject.site not in inside and argument.id not in stored and not ends


def _is_one_module(reading: Reading, first: Shard, second: Shard) -> bool:
    """Not merely two elements of one list: then both loops have to go over the same."""
    if first.event.loop is None and second.event.loop is None:
        return "[]" not in getattr(first.subject, "path", ()) and len(first.together) == len(second.together) == 1
    one, other = first.event.loop, second.event.loop
    if not (isinstance(one, ast.For) and isinstance(other, ast.For)):
        return False
    same = one is other or reading.file.source(one.iter) == reading.file.source(other.iter)
    by_name = all(isinstance(argument, ast.Name) for shard in (first, second) for argument in _first_arguments(shard))
    return same and by_name and not (one is not other and _has_tests_inside(first, second))


def _first_arguments(shard: Shard) -> list[ast.expr]:
    return shard.event.node.args[:1] if isinstance(shard.event.node, ast.Call) else []


def _has_tests_inside(*shards: Shard) -> bool:
    return any(
        shard.event.loop is not None and guard.test.lineno >= shard.event.loop.lineno
        for shard in shards
        for guard in shard.event.guards
    )
