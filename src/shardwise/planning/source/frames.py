"""The state of reading code: frames, facts found so far, and the tables of statements and expressions."""

import ast
import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from shardwise.planning.places import Places
from shardwise.planning.source.values import PLAIN, Source, Value, join, known

MOST_STEPS = 30_000
MOST_DEPTH = 30


class Fact(NamedTuple):
    """One thing that the code of the last module in `chain` does to `target`."""

    kind: str
    """call, method, read (of `target`'s parameter `name`), escape (of it to the caller), dispatch,
    or count (`name` times at least)."""
    chain: tuple[nn.Module, ...]
    target: nn.Module
    name: str = ""
    conditional: bool = False

    def key(self) -> tuple[Any, ...]:
        """What makes two facts the same."""
        return (self.kind, tuple(map(id, self.chain)), id(self.target), self.name, self.conditional)


class TooComplex(Exception):
    """The code does not end within the reader's budget; its class counts as unreadable."""


class Loop(NamedTuple):
    """A loop that is running; `count` is its number of turns where known."""

    identity: int
    count: int | None


class Analysis:
    """What reading one entry (a module's forward or another method) has found."""

    def __init__(self, places: Places, entry: str) -> None:
        self.places, self.entry = places, entry
        self.facts: dict[tuple[Any, ...], Fact] = {}
        self.counts: dict[int, int] = {}
        self.settings: set[tuple[int, str]] = set()
        self.deferred: dict[tuple[int, str], tuple[nn.Module, str]] = {}
        self.results: dict[Any, Any] = {}
        self.running: list[Any] = []
        self.activity = 0
        self.steps = 0
        self.num_loops = 0

    def step(self) -> None:
        """Count one step against the budget."""
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise TooComplex(f"more than {MOST_STEPS} steps")

    def add(self, fact: Fact) -> None:
        """Keep a fact, once."""
        self.facts[fact.key()] = fact

    def decide(self, value: Value) -> None:
        """Remember that the outcome hangs on the settings behind `value`."""
        self.settings |= value.settings


@dataclass(slots=True, eq=False)
class Frame:
    """One function being read, on behalf of the last module in `chain`."""

    analysis: Analysis
    chain: tuple[nn.Module, ...]
    function: Any  # a plain function or None; a checker would take the type for a method
    names: dict[str, Value]
    outer: "Frame | None" = None
    receiver: Any = None
    conditional: bool = False
    skipping: bool = False
    """The data may have ended this turn of the loop, or the function, before this point."""
    loops: tuple[Loop, ...] = ()
    depth: int = 0
    dead: str = ""
    """Why the code after this point does not run: `raise`, `jump`, or nothing."""
    returns: list[Value] = field(default_factory=list)
    yields: list[Value] = field(default_factory=list)
    exit_counts: list[dict[int, int]] = field(default_factory=list)
    jumps: list[tuple[dict[str, Value], dict[int, int]]] = field(default_factory=list)
    """Names and counts at each `continue` and `break` of the innermost loop."""

    def lookup(self, name: str) -> Value:
        """The value of a name, by Python's rules of scope."""
        frame: Frame | None = self
        while frame is not None:
            if name in frame.names:
                return frame.names[name]
            frame = frame.outer
        function = self.function
        if function is None:
            return PLAIN
        if name in function.__code__.co_freevars:
            cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
            try:
                return known(cell.cell_contents)
            except ValueError:  # not filled yet
                return PLAIN
        if name in function.__globals__:
            return known(function.__globals__[name])
        return known(getattr(builtins, name)) if hasattr(builtins, name) else PLAIN

    @property
    def is_torch_code(self) -> bool:
        """Whether torch, not the model's author, wrote the function."""
        return self.function is not None and (self.function.__module__ or "").startswith("torch.")

    @property
    def is_conditional(self) -> bool:
        """Whether the data decides if this point is reached."""
        return self.conditional or self.skipping

    @contextmanager
    def under(self, condition: bool) -> Iterator[None]:
        """Run code that depends on the data if `condition`."""
        before = self.conditional
        self.conditional = before or condition
        try:
            yield
        finally:
            self.conditional = before


Expression = Callable[[Any, Frame], Value]
Statement = Callable[[Any, Frame], None]
EXPRESSIONS: dict[type[ast.AST], Expression] = {}
STATEMENTS: dict[type[ast.AST], Statement] = {}


def expression(*kinds: type[ast.AST]) -> Callable[[Expression], Expression]:
    """Register how expressions of these kinds are evaluated."""

    def register(function: Expression) -> Expression:
        EXPRESSIONS.update(dict.fromkeys(kinds, function))
        return function

    return register


def statement(*kinds: type[ast.AST]) -> Callable[[Statement], Statement]:
    """Register how statements of these kinds are run."""

    def register(function: Statement) -> Statement:
        STATEMENTS.update(dict.fromkeys(kinds, function))
        return function

    return register


def evaluate(node: ast.AST, frame: Frame) -> Value:
    """What an expression may be; facts met on the way are recorded."""
    frame.analysis.step()
    handler = EXPRESSIONS.get(type(node))
    if handler is not None:
        return handler(node, frame)
    parts = [evaluate(child, frame) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    return PLAIN.like(source=max((part.source for part in parts), default=Source.PLAIN))


def execute(body: list[ast.stmt], frame: Frame) -> None:
    """Run statements until one of them leaves the block."""
    for node in body:
        if frame.dead:
            return
        frame.analysis.step()
        handler = STATEMENTS.get(type(node))
        if handler is not None:
            handler(node, frame)


def join_counts(many: list[dict[int, int]]) -> dict[int, int]:
    """The calls that are made whichever of several ways the code takes."""
    shared = set(many[0]).intersection(*many[1:])
    return {identity: min(counts[identity] for counts in many) for identity in shared}


def join_names(many: list[dict[str, Value]]) -> dict[str, Value]:
    """Local names after several ways through the code have met."""
    if len(many) == 1:
        return many[0]
    names = dict.fromkeys(name for one in many for name in one)
    return {name: join(one[name] for one in many if name in one) for name in names}
