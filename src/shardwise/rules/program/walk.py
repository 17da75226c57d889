"""Where a reading of the program stands: names, objects, tests taken and blocks entered so far."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from shardwise.rules.program.events import Event, Guard, Trace
from shardwise.rules.program.values import UNKNOWN, Env, Part, Thing, Values, attribute, join
from shardwise.rules.scopes import Function
from shardwise.rules.source import FileContext

MAX_DEPTH = 8
MAX_EVENTS = 20_000  # of one trace; a file that reaches it is read no further

Loop = ast.For | ast.AsyncFor | ast.While
ITEM = "[]"


class OutOfBudget(Exception):
    """The trace is long enough; what has been read so far stands."""


@dataclass(slots=True)
class Walk:
    """The state of reading one trace."""

    file: FileContext
    root: ast.AST
    module_env: Env
    env: Env = field(default_factory=dict)
    trace: Trace = field(default_factory=Trace)
    heap: dict[tuple[Thing | Part, str], Values] = field(default_factory=dict)
    """Attributes and items that were stored."""
    guards: list[Guard] = field(default_factory=list)
    contexts: list[Event] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    chain: list[ast.Call] = field(default_factory=list)
    active: list[Function] = field(default_factory=list)
    """The functions being read, outermost first."""
    returned: list[Values] = field(default_factory=list)
    reached: set[Function] = field(default_factory=set)
    turn: tuple[int, ...] = ()
    """Of the loops that are read turn by turn."""
    meta_depth: int = 0

    def unroll(self, elements: Sequence[Values]) -> Iterator[Values]:
        """Go through the turns of a loop; what is made in one turn is not what is made in another."""
        outer = self.turn
        for number, element in enumerate(elements):
            self.turn = (*outer, number) if len(elements) > 1 else outer
            yield element
        self.turn = outer

    def emit(self, node: ast.Call | ast.Attribute, **facts: object) -> Event:
        """Add an event that happens here and now."""
        if len(self.trace.events) >= MAX_EVENTS:
            raise OutOfBudget
        event = Event(
            node=node,
            order=len(self.trace.events),
            root=self.root,
            guards=tuple(self.guards),
            chain=tuple(self.chain),
            contexts=tuple(self.contexts),
            loop=self.loops[-1] if self.loops else None,
            **facts,  # pyrefly: ignore
        )
        self.trace.events.append(event)
        return event

    @contextmanager
    def guarded(self, test: ast.expr | ast.ExceptHandler, taken: bool) -> Iterator[None]:
        """Inside: the test came out so."""
        length = len(self.guards)
        self.assume(test, taken)
        try:
            yield
        finally:
            del self.guards[length:]

    def assume(
        self, test: ast.expr | ast.ExceptHandler, taken: bool, branch: tuple[ast.AST, bool] | None = None
    ) -> None:
        """From here to the end of the block: the test came out so."""
        branch = branch or (test, taken)
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, taken = test.operand, not taken
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == taken:
            # All of an `and` hold where it is taken; none of an `or` where it is not.
            for value in test.values:
                self.assume(value, taken, branch)
        else:
            key = f"except {test.lineno}" if isinstance(test, ast.ExceptHandler) else self.file.source(test)
            self.guards.append(Guard(test, taken, key, branch))

    def load(self, owner: Thing | Part, name: str) -> Values:
        """An attribute, or an item by the name `[]`, of an object."""
        stored = self.heap.get((owner, name))
        return stored if stored is not None else frozenset({attribute(owner, name)})

    def store(self, owner: Thing | Part, name: str, values: Values) -> None:
        """Set an attribute or item; under a test, it may also keep what it had."""
        for value in values:
            if isinstance(value, Thing | Part) and value != owner:
                self.trace.owners.setdefault(value, set()).add(owner)
        before = self.heap.get((owner, name))
        keeps = before is not None and (self.guards or name == ITEM)
        self.heap[owner, name] = join(before, values) if keeps and before is not None else values

    def rebind(self, node: ast.expr, values: Values, owners: Values = UNKNOWN) -> None:
        """Give the name or attribute by which a dictionary or list was reached its new content."""
        if isinstance(node, ast.Name):
            self.env[node.id] = values
        elif isinstance(node, ast.Attribute):
            for owner in owners:
                if isinstance(owner, Thing | Part):
                    self.heap[owner, node.attr] = values

    def find_method(self, definition: ast.ClassDef, name: str) -> Function | None:
        """A method of a class, or of its first base in this file, and so on."""
        for _ in range(MAX_DEPTH):
            for statement in definition.body:
                if isinstance(statement, Function) and statement.name == name:
                    return statement
            bases = [self.file.definition(base) for base in definition.bases]
            base = next((one for one in bases if isinstance(one, ast.ClassDef)), None)
            if base is None:
                return None
            definition = base
        return None

    def look_up(self, name: str) -> Values:
        """A name's values in the function being read, else in the module."""
        if name in self.env:
            return self.env[name]
        return self.module_env.get(name, UNKNOWN)


def merge(into: Env, other: Env) -> Env:
    """The names after two branches that may both have been taken."""
    return {name: join(into.get(name, UNKNOWN), other.get(name, UNKNOWN)) for name in into.keys() | other.keys()}
