"""Abstract values of expressions, and the frames of functions being read."""

import ast
import builtins
import itertools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Literal, NamedTuple

from torch import nn

from shardwise.planning.calls import Places, Use, UseKind, is_holder

_SIMPLE = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_ITEMS_TRIED = 16


class Source(NamedTuple):
    """Origin of data: a module, an argument or a parameter."""

    kind: Literal["module", "argument", "parameter"]
    name: str
    """FQN of the module or parameter, or the argument's name."""


class Operation(NamedTuple):
    """Operation on data."""

    name: str
    sizes: tuple[int | None, ...]
    """Arguments; None for values other than known numbers."""
    module: str
    """FQN of the module with the operation in its code."""


Trail = frozenset[tuple[Source, Operation | None]]
"""Sources of a value, each paired with every operation applied to it, and with None."""


class Origin(IntEnum):
    """Kind of data that a value was computed from; the larger of two wins."""

    PLAIN = 0
    """Constants, settings, shapes: the same for every batch."""
    ARGUMENT = 1
    """Passed by the caller: may be a tensor or a flag."""
    TENSOR = 2
    """Certainly a tensor; a condition on it depends on the data."""
    TENSOR_VALUE = 3
    """A number or mask computed from a tensor's content."""
    DYNAMIC = 4
    """A tensor or list whose length depends on the data."""
    # Random numbers are not data, but also differ between ranks.
    RANDOM = 5
    """Random number between 0 and 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """One real object: a module, a parameter, a setting, a function, a constant."""

    object: Any

    def _key(self) -> tuple[Any, ...]:
        simple = isinstance(self.object, _SIMPLE)
        return (type(self.object), repr(self.object)) if simple else (id(self.object),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Known) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list or tuple literal."""

    items: tuple["Value", ...]


@dataclass(frozen=True, slots=True)
class Mapping:
    """A dictionary literal with constant keys."""

    items: tuple[tuple[Any, "Value"], ...]


@dataclass(frozen=True, slots=True)
class Repeated:
    """An unknown number of values: a generator, a slice with unknown bounds, a list that a loop fills."""

    element: "Value"


@dataclass(frozen=True, slots=True)
class Bound:
    """A function that will get a real object as its first argument."""

    function: Any
    receiver: Known
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Closure:
    """A function defined in the code being read, with its enclosing frame."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    frame: Any


@dataclass(frozen=True, slots=True)
class Partial:
    """A callable with some arguments bound, as by `functools.partial`."""

    callee: "Value"
    positional: tuple["Value", ...]
    keywords: tuple[tuple[str, "Value"], ...]


@dataclass(frozen=True, slots=True)
class Super:
    """`super()` of an object, seen from a class."""

    after: type
    receiver: Known


@dataclass(frozen=True, slots=True)
class Missing:
    """An attribute that the module does not have: code that uses it cannot run for this model."""


Atom = Known | Sequence | Mapping | Repeated | Bound | Closure | Partial | Super | Missing


@dataclass(frozen=True, slots=True)
class Value:
    """Possible results of an expression."""

    atoms: frozenset[Atom] = frozenset()
    may_be_unknown: bool = False
    """Whether it may also be an object unknown to the analysis."""
    source: Origin = Origin.PLAIN
    data_dependent: bool = False
    """Whether the choice between its atoms depends on the data."""
    trail: Trail = frozenset()
    """Sources and operations; empty unless the analysis follows data."""

    def constant(self) -> Any:
        """Return the only possible object, or `Unknown`."""
        if len(self.atoms) == 1 and not self.may_be_unknown:
            (atom,) = self.atoms
            if isinstance(atom, Known):
                return atom.object
        return Unknown

    @property
    def num_objects(self) -> int:
        """Number of possible objects."""
        return len({id(_object(leaf)) for leaf in leaves(self)})

    def replace(self, **changes: Any) -> "Value":
        """Return a copy with these fields changed."""
        return replace(self, **changes)

    def selected_by(self, other: "Value") -> "Value":
        """Return the value, data-dependent also if `other` is."""
        return self if self.data_dependent or not other.data_dependent else self.replace(data_dependent=True)


def _object(leaf: "Known | Bound | Closure") -> Any:
    return leaf.object if isinstance(leaf, Known) else leaf.receiver.object if isinstance(leaf, Bound) else leaf


def from_source(kind: Literal["module", "argument", "parameter"], name: str) -> Trail:
    """Return the trail of a value without operations."""
    return frozenset({(Source(kind, name), None)})


class Unknown:
    """Marker for "no single object"; never instantiated."""


PLAIN = Value(may_be_unknown=True)
ARGUMENT = Value(may_be_unknown=True, source=Origin.ARGUMENT)
TENSOR = Value(may_be_unknown=True, source=Origin.TENSOR)
TENSOR_VALUE = Value(may_be_unknown=True, source=Origin.TENSOR_VALUE)
NONE = Value(frozenset({Known(None)}))


def known(thing: Any) -> Value:
    """Return the value of a real object."""
    return Value(frozenset({Known(thing)}))


def just(atom: Atom) -> Value:
    """Return the value with only this atom."""
    return Value(frozenset({atom}))


def opaque(*values: Value, source: Origin | None = None) -> Value:
    """Return an unknown value computed from these values."""
    top = max((value.source for value in values), default=Origin.PLAIN) if source is None else source
    return Value(may_be_unknown=True, source=top, trail=trail_of(*values))


def trail_of(*values: Value, depth: int = 4) -> Trail:
    """Return the sources and operations of these values and the values inside them."""
    inner = [part for value in values for atom in value.atoms for part in inside(atom)] if depth else []
    trail = frozenset[Any]().union(*(value.trail for value in values))
    return trail | trail_of(*inner, depth=depth - 1) if inner else trail


def join(values: Iterable[Value]) -> Value:
    """Return the value that may be any of these."""
    distinct = list(dict.fromkeys(values))
    if len(distinct) == 1:
        return distinct[0]
    atoms: frozenset[Atom] = frozenset().union(*(value.atoms for value in distinct))
    return Value(
        atoms=atoms,
        may_be_unknown=any(value.may_be_unknown for value in distinct),
        source=max((value.source for value in distinct), default=Origin.PLAIN),
        data_dependent=any(value.data_dependent for value in distinct),
        trail=frozenset[Any]().union(*(value.trail for value in distinct)),
    )


def leaves(value: Value, depth: int = 4) -> Iterator[Known | Bound | Closure]:
    """Yield the real objects and callables of a value, including those in lists and dictionaries."""
    for atom in value.atoms:
        if isinstance(atom, Known | Bound | Closure):
            yield atom
        elif depth:
            for inner in inside(atom):
                yield from leaves(inner, depth - 1)


def inside(atom: Atom) -> Iterable[Value]:
    """Return the values in a container or a partial call."""
    if isinstance(atom, Sequence):
        return atom.items
    if isinstance(atom, Mapping):
        return [inner for _, inner in atom.items]
    if isinstance(atom, Repeated):
        return [atom.element]
    if isinstance(atom, Partial):
        return [atom.callee, *atom.positional, *(inner for _, inner in atom.keywords)]
    return ()


MOST_STEPS = 60_000
MOST_TURNS = 512
"""Maximum number of items of a loop that is run for each item; longer loops run for any item."""
MOST_DEPTH = 30


class TooComplex(Exception):
    """The code exceeds the budget of the analysis; its class counts as unreadable."""


class Analysis:
    """Results of reading one entry: a module's forward or another method."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.uses: dict[Use, None] = {}
        self.counts: dict[str, int] = {}
        """Minimum number of calls of each module."""
        self.running: list[Any] = []
        self.activity = 0
        """Number of calls of modules and reads of parameters; 0 if the code computes nothing."""
        self.steps = 0
        self.flow: Any = None
        """Data flow analysis (`flow.Flow`), if requested."""

    def add(
        self, kind: UseKind, chain: Iterable[nn.Module], target: str, method: str = "forward", conditional: bool = False
    ) -> None:
        """Record a use."""
        self.uses[Use(kind, tuple(map(self.places.name, chain)), target, method, conditional)] = None


@dataclass(slots=True, eq=False)
class Frame:
    """One function being read, in a call of the last module of `chain`."""

    analysis: Analysis
    chain: tuple[nn.Module, ...]
    function: Any  # a plain function or None; type checkers would treat a function type as a method
    names: dict[str, Value]
    outer: "Frame | None" = None
    receiver: Any = None
    conditional: bool = False
    skipping: bool = False
    """Whether the data may have ended this turn of the loop, or the function, before this point."""
    again: bool = False
    """Whether this is in a loop with an unknown number of turns."""
    depth: int = 0
    dead: str = ""
    """Why the code after this point does not run: `raise` or `jump`; empty if it runs."""
    returns: list[Value] = field(default_factory=list)
    yields: list[Value] = field(default_factory=list)
    exit_counts: list[dict[str, int]] = field(default_factory=list)
    jumps: list[tuple[dict[str, Value], dict[str, int]]] = field(default_factory=list)
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
            except ValueError:  # empty cell
                return PLAIN
        if name in function.__globals__:
            return known(function.__globals__[name])
        return known(getattr(builtins, name)) if hasattr(builtins, name) else PLAIN

    @property
    def is_torch_code(self) -> bool:
        """Whether the function is torch's."""
        return self.function is not None and (self.function.__module__ or "").startswith("torch.")

    @property
    def is_conditional(self) -> bool:
        """Whether reaching this point depends on the data."""
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

    def child(self, function: Any, receiver: Any, names: dict[str, Value]) -> "Frame":
        """Return the frame of a function called in this frame."""
        return Frame(
            analysis=self.analysis,
            chain=self.chain,
            function=function,
            names=names,
            receiver=receiver,
            conditional=self.is_conditional,
            again=self.again,
            depth=self.depth + 1,
        )

    def evaluate(self, node: ast.AST) -> Value:
        """Evaluate an expression, recording calls and reads in it."""
        handler = self._handler(node)
        if handler is not None:
            return handler(node, self)
        parts = [self.evaluate(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return PLAIN.replace(source=max((part.source for part in parts), default=Origin.PLAIN), trail=trail_of(*parts))

    def execute(self, body: list[ast.stmt]) -> None:
        """Run statements until one of them leaves the block."""
        for node in body:
            if self.dead:
                return
            handler = self._handler(node)
            if handler is not None:
                handler(node, self)

    def _handler(self, node: ast.AST) -> Callable[[Any, "Frame"], Any] | None:
        self.analysis.steps += 1
        if self.analysis.steps > MOST_STEPS:
            raise TooComplex(f"more than {MOST_STEPS} steps")
        return HANDLERS.get(type(node))

    def record_call(self, module: nn.Module, through: Value) -> None:
        """Record a call `module(...)` in this frame; `through` is the called value."""
        analysis = self.analysis
        if module not in analysis.places or is_holder(module):
            return
        if id(module) in analysis.places.internal:  # `attention.out_proj(x)`: its weights belong to its owner
            for parameter in module.parameters():
                self.record_read(parameter)
            return
        analysis.activity += 1
        name = analysis.places.name(module)
        analysis.add("call", self.chain, name, conditional=self.is_conditional or through.data_dependent)
        if through.num_objects == 1:  # otherwise some of the objects may not be called
            analysis.counts[name] = analysis.counts.get(name, 0) + (2 if self.again else 1)

    def record_read(self, parameter: nn.Parameter) -> None:
        """Record a computation with a parameter in this frame."""
        places = self.analysis.places
        self.analysis.activity += 1
        # torch's own modules read their children's weights to choose a fused kernel, but call them anyway.
        if self.is_torch_code or places.covered(self.chain) & {id(owner) for owner in places.owners(parameter)}:
            return
        self.analysis.add("read", self.chain, places.parameter_name(parameter))

    def record_escape(self, value: Value) -> None:
        """Record parameters in the result, as in `return output, self.bias`: the caller will compute with them."""
        for parameter in self._parameters(value):
            self.analysis.add("escape", self.chain, self.analysis.places.parameter_name(parameter))

    def consume(self, value: Value) -> Value:
        """Use a value in a computation: record its parameters and return a value without objects."""
        for parameter in self._parameters(value):
            self.record_read(parameter)
        return PLAIN.replace(source=value.source, trail=self.trail(value))

    def trail(self, *values: Value) -> Trail:
        """Return the sources and operations of these, including parameters; empty unless data are followed."""
        if self.analysis.flow is None:
            return frozenset()
        read = [parameter for value in values for parameter in self._parameters(value)]
        names = map(self.analysis.places.parameter_name, read)
        return trail_of(*values) | {(Source("parameter", name), None) for name in names}

    def note_size_read(self, value: Value) -> None:
        """Record that code of the innermost module reads the size of a value."""
        if self.analysis.flow is not None:
            self.analysis.flow.sizes_read[self.analysis.places.name(self.chain[-1])] |= value.trail

    def after(self, operation: str, result: Value, *values: Value, sizes: Iterable[Value] = ()) -> Value:
        """Return `result` with the trail of an operation on these values."""
        if not (trail := self.trail(*values)):
            return result
        if operation == "cross_entropy":  # the trail ends at the loss
            self.analysis.flow.in_loss |= trail
            return result.replace(trail=frozenset())
        known = (size.constant() for size in sizes)
        numbers = tuple(size if type(size) is int else None for size in known)
        done = Operation(operation, numbers, self.analysis.places.name(self.chain[-1]))
        return result.replace(trail=trail | {(source, done) for source, _ in trail})

    def _parameters(self, value: Value) -> list[nn.Parameter]:
        has_parameter = self.analysis.places.has_parameter
        return [leaf.object for leaf in leaves(value) if isinstance(leaf, Known) and has_parameter(leaf.object)]

    def is_interesting(self, arguments: list[Value]) -> bool:
        """Whether a function with these arguments could call a module or read a parameter."""
        if self.analysis.flow is not None and trail_of(*arguments):
            return True
        return any(
            isinstance(leaf, Closure) or self._holds_modules(leaf) for value in arguments for leaf in leaves(value)
        )

    def _holds_modules(self, leaf: Known | Bound) -> bool:
        thing = leaf.object if isinstance(leaf, Known) else leaf.receiver.object
        if isinstance(thing, nn.Module) or self.analysis.places.has_parameter(thing):
            return True
        inner = getattr(type(thing), "__dict__", None) and getattr(thing, "__dict__", None)
        if not isinstance(inner, dict) or isinstance(thing, type | types.ModuleType | types.FunctionType):
            return False
        return any(isinstance(item, nn.Module) for held in inner.values() for item in _held(held))


def _held(thing: Any) -> Iterable[Any]:
    if type(thing) in (list, tuple, set):
        return itertools.islice(thing, _ITEMS_TRIED)
    return itertools.islice(thing.values(), _ITEMS_TRIED) if type(thing) is dict else (thing,)


HANDLERS: dict[type[ast.AST], Callable[[Any, Frame], Any]] = {}
"""Handlers of expressions, which return a `Value`, and of statements."""


def handles(table: dict[Any, Any], *keys: Any) -> Callable[[Any], Any]:
    """Register a function in a table of handlers under these keys."""

    def register(function: Any) -> Any:
        table.update(dict.fromkeys(keys, function))
        return function

    return register


def join_counts(many: list[dict[str, int]]) -> dict[str, int]:
    """Return the calls that are common to all paths."""
    shared = set(many[0]).intersection(*many[1:])
    return {name: min(counts[name] for counts in many) for name in shared}


def join_names(many: list[dict[str, Value]]) -> dict[str, Value]:
    """Return local names after joining several paths."""
    if len(many) == 1:
        return many[0]
    names = dict.fromkeys(name for one in many for name in one)
    return {name: join(one[name] for one in many if name in one) for name in names}
