"""Which of a file's assignments can be the one whose value is used at a place."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable

from shardwise.source.syntax import Comprehension, FileContext, Function

_LEAVES = ast.Return | ast.Raise | ast.Continue | ast.Break
_CONDITIONS = ast.If | ast.Try | ast.TryStar | ast.For | ast.While | ast.AsyncFor | ast.match_case
_LOOPS = ast.For | ast.While | ast.AsyncFor


class Reaching:
    """The order of assignments and uses in one file; places of other files reach every use.

    Args:
        context: The file.
    """

    def __init__(self, context: FileContext) -> None:
        self.context = context
        self._reach: dict[tuple[ast.AST, ast.AST], bool] = {}
        self._functions: dict[ast.AST, Function | None] = {}

    def function(self, node: ast.AST) -> Function | None:
        """The function whose body a node is in."""
        if node not in self._functions:
            self._functions[node] = self.context.enclosing_function(node)
        return self._functions[node]

    def may_reach(self, place: ast.AST, used: ast.AST) -> bool:
        """Whether a value given at one place can be what is used at another."""
        key = place, used
        if key not in self._reach:
            self._reach[key] = self._can_come(place, used)
        return self._reach[key]

    def _can_come(self, place: ast.AST, used: ast.AST) -> bool:
        context = self.context
        if (
            isinstance(place, ast.arg)
            or place not in context.parents
            or self.function(place) is not self.function(used)
        ):
            return True
        around = set(context.ancestors(used))
        inside = next((one for one in context.ancestors(place) if isinstance(one, Comprehension | ast.stmt)), None)
        if isinstance(inside, Comprehension) and isinstance(place, ast.Name):
            return inside in around  # its variable
        is_target = isinstance(getattr(place, "ctx", None), ast.Store)
        if not is_target and place not in around and context.statement(place) is context.statement(used):
            return True  # made in the same statement: `first, second = FSDP(model), None`
        if _end(context, place) > _start(used):
            loops = {one for one in context.ancestors(place) if isinstance(one, _LOOPS)}
            return not loops.isdisjoint(around)
        statement = context.statement(place)
        for outer in (statement, *context.ancestors(statement)):
            if outer in around or not isinstance(outer, ast.stmt):
                break
            block = context.block(outer)
            if isinstance(block[-1], _LEAVES) and context.parents.get(outer) not in around:
                return False  # `if sharded: model = FSDP(model); return model`
        return not context.are_exclusive(place, used)

    def those_that_reach(self, places: Iterable[ast.AST], used: ast.AST) -> list[ast.AST]:
        """The places whose value may be the one used: no other always takes its place before the use."""
        found = [place for place in places if self.may_reach(place, used)]
        return [
            one for one in found if not any(self._replaces(other, one, used) for other in found if other is not one)
        ]

    def _replaces(self, other: ast.AST, place: ast.AST, used: ast.AST) -> bool:
        context = self.context
        if other not in context.parents or place not in context.parents or isinstance(other, ast.arg):
            return False
        home = self.function(place) if not isinstance(place, ast.arg) else context.parents[context.parents[place]]
        statement = context.statement(other)
        around_other = itertools.takewhile(lambda one: one is not statement, context.ancestors(other))
        if any(isinstance(one, Comprehension | ast.IfExp | ast.BoolOp) for one in around_other):
            return False
        if self.function(other) is not home or isinstance(statement, ast.AugAssign | ast.For | ast.AsyncFor):
            return False
        is_local = self.function(used) is home
        before = isinstance(place, ast.arg) or _end(context, place) <= _start(statement)
        if not before or context.are_exclusive(other, place) or (is_local and _end(context, other) > _start(used)):
            return False
        around = set(context.ancestors(place if not is_local else used))
        return all(one in around for one in context.ancestors(other) if isinstance(one, _CONDITIONS)) or (
            is_local and self.always_reaches(other, used)
        )

    def always_reaches(self, place: ast.AST, used: ast.AST) -> bool:
        """Whether the assignment happens on every way to the use, within one function."""
        around = set(self.context.ancestors(used))
        for parent in self.context.ancestors(place):
            if isinstance(parent, Function | ast.Module | ast.ClassDef):
                return True
            if isinstance(parent, _CONDITIONS) and parent not in around:
                return False
        return True


def _start(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _end(context: FileContext, place: ast.AST) -> tuple[int, int]:
    """Where a store has happened: at the end of its assignment."""
    statement = context.statement(place)
    node = statement if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr) else place
    return getattr(node, "end_lineno", 0) or 0, getattr(node, "end_col_offset", 0) or 0
