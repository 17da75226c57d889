"""The state of reading code: frames, the facts found so far, and the tables that statements and expressions fill."""

import ast
import builtins
import math
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from shardwise.planning.places import Places, is_holder
from shardwise.planning.source_values import PLAIN, Bound, Closure, Known, Source, Value, join, known, leaves

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
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise TooComplex(f"more than {MOST_STEPS} steps")

    def add(self, fact: Fact) -> None:
        self.facts[fact.key()] = fact

    def decide(self, value: Value) -> None:
        """Remember that the outcome hangs on the settings behind `value`."""
        self.settings |= value.settings


@dataclass(slots=True, eq=False)
class Frame:
    """One function being read, on behalf of the last module in `chain`."""

    analysis: Analysis
    chain: tuple[nn.Module, ...]
    function: types.FunctionType | None
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
        return self.function is not None and (self.function.__module__ or "").startswith("torch.")

    @property
    def is_conditional(self) -> bool:
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


def record_call(module: nn.Module, through: Value, frame: Frame) -> None:
    """`module(...)` is written in this frame; `through` is the value that was called."""
    analysis = frame.analysis
    if module not in analysis.places or id(module) in analysis.places.internal or is_holder(module):
        return
    analysis.activity += 1
    analysis.add(Fact("call", frame.chain, module, "", frame.is_conditional or through.picked))
    turns = math.prod(loop.count or 0 for loop in frame.loops if loop.identity in through.loops)
    if turns >= len(candidates(through)):  # otherwise some of them may not be called at all
        again = any(loop.count is None or loop.count > 1 for loop in unwalked(through, frame))
        analysis.counts[id(module)] = analysis.counts.get(id(module), 0) + (2 if again else 1)


def candidates(value: Value) -> set[int]:
    """Identities of the objects that a value may be."""
    return {id(_object(leaf)) for leaf in leaves(value)}


def unwalked(value: Value, frame: Frame) -> tuple[Loop, ...]:
    """The running loops that come back to the same object: it is not theirs, or they have more turns than objects."""
    return tuple(
        loop
        for loop in frame.loops
        if loop.identity not in value.loops
        or (loop.count is not None and loop.count > len(candidates(value)))
    )


def _object(leaf: Known | Bound | Closure) -> Any:
    return (
        leaf.object if isinstance(leaf, Known) else leaf.receiver.object if isinstance(leaf, Bound) else leaf
    )


def record_read(parameter: nn.Parameter, frame: Frame) -> None:
    """A parameter takes part in a computation written in this frame."""
    places = frame.analysis.places
    frame.analysis.activity += 1
    # torch's own modules read their children's weights to choose a fused kernel; they call them all the same.
    if frame.is_torch_code or places.covered(frame.chain) & {id(owner) for owner in places.owners(parameter)}:
        return
    owner, _, name = places.parameter_name(parameter).rpartition(".")
    frame.analysis.add(Fact("read", frame.chain, places.modules[owner], name))


def record_escape(value: Value, frame: Frame) -> None:
    """A parameter is among the results (Megatron's `return output, self.bias`): the caller will compute with it."""
    places = frame.analysis.places
    for leaf in leaves(value):
        if isinstance(leaf, Known) and places.has_parameter(leaf.object):
            owner, _, name = places.parameter_name(leaf.object).rpartition(".")
            frame.analysis.add(Fact("escape", frame.chain, places.modules[owner], name))


def consume(value: Value, frame: Frame) -> None:
    """The value goes into a computation: record the parameters in it."""
    for leaf in leaves(value):
        if isinstance(leaf, Known) and frame.analysis.places.has_parameter(leaf.object):
            record_read(leaf.object, frame)


def is_interesting(value: Value, places: Places) -> bool:
    """Whether a function that gets this value could call a module or read a parameter through it."""
    return any(isinstance(leaf, Closure) or _holds_modules(leaf, places) for leaf in leaves(value))


def _holds_modules(leaf: Any, places: Places) -> bool:
    thing = leaf.object if isinstance(leaf, Known) else leaf.receiver.object
    if isinstance(thing, nn.Module) or places.has_parameter(thing):
        return True
    inner = getattr(type(thing), "__dict__", None) and getattr(thing, "__dict__", None)
    if not isinstance(inner, dict) or isinstance(thing, type | types.ModuleType | types.FunctionType):
        return False
    return any(isinstance(item, nn.Module) for item in inner.values())


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
