"""What the source reader knows about a value: which real objects it may be, and what it depends on."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

_SIMPLE = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_MOST_ATOMS = 20_000


class Source(IntEnum):
    """What a value was computed from; a larger one wins when two meet."""

    PLAIN = 0
    """Constants, settings, shapes: the same for every batch."""
    ARGUMENT = 1
    """Handed in by the caller: a tensor or a flag, nobody knows."""
    TENSOR = 2
    """Certainly a tensor; a condition on it depends on the data."""
    CONTENT = 3
    """A number or mask computed from a tensor's content."""
    DYNAMIC = 4
    """A tensor or list whose very length depends on the data."""
    # A draw is not data, but ranks differ in it all the same.
    RANDOM = 5
    """Drawn at random, between 0 and 1."""


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
    """A list or tuple written out in the code."""

    items: tuple["Value", ...]


@dataclass(frozen=True, slots=True)
class Mapping:
    """A dictionary written out in the code, with constant keys."""

    items: tuple[tuple[Any, "Value"], ...]


@dataclass(frozen=True, slots=True)
class Many:
    """Any number of values that are all alike: a loop, a comprehension, a container walked through."""

    element: "Value"
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Bound:
    """A function that will get a real object as its first argument."""

    function: Any
    receiver: Known
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Closure:
    """A function defined in the code being read, with the frame that it can see."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    frame: Any


@dataclass(frozen=True, slots=True)
class Partial:
    """A callable with some of its arguments given."""

    callee: "Value"
    positional: tuple["Value", ...]
    keywords: tuple[tuple[str, "Value"], ...]


@dataclass(frozen=True, slots=True)
class Super:
    """`super()` of an object, seen from a class."""

    after: Known
    receiver: Known


@dataclass(frozen=True, slots=True)
class Parameters:
    """`module.parameters()` before anything walks through it."""

    module: Known
    named: bool = False


@dataclass(frozen=True, slots=True)
class Absent:
    """An attribute that the module does not have: code that uses it cannot run as the model stands."""


Atom = Known | Sequence | Mapping | Many | Bound | Closure | Partial | Super | Parameters | Absent


@dataclass(frozen=True, slots=True)
class Value:
    """What an expression may be."""

    atoms: frozenset[Atom] = frozenset()
    open: bool = False
    """It may also be something that the reader does not know."""
    source: Source = Source.PLAIN
    picked: bool = False
    """Which of the atoms it is depends on the data."""
    loops: frozenset[int] = frozenset()
    """The loops whose turn decides which of the atoms it is."""
    settings: frozenset[tuple[int, str]] = frozenset()
    """The module attributes (identity, name) it was read from, for reuse among layers of one class."""

    def only(self) -> Any:
        """The one real object it must be, or `Unknown`."""
        if len(self.atoms) == 1 and not self.open:
            (atom,) = self.atoms
            if isinstance(atom, Known):
                return atom.object
        return Unknown

    def like(self, **changes: Any) -> "Value":
        """The same value but for these fields."""
        return replace(self, **changes)


class Unknown:
    """Stands for "no single object"; never instantiated."""


PLAIN = Value(open=True)
ARGUMENT = Value(open=True, source=Source.ARGUMENT)
TENSOR = Value(open=True, source=Source.TENSOR)
CONTENT = Value(open=True, source=Source.CONTENT)
NONE = Value(frozenset({Known(None)}))


def known(thing: Any, *, settings: frozenset[tuple[int, str]] = frozenset()) -> Value:
    """The value that is certainly this real object."""
    return Value(frozenset({Known(thing)}), settings=settings)


def opaque(*values: Value, source: Source | None = None) -> Value:
    """Something unknown that was computed from these values."""
    top = max((value.source for value in values), default=Source.PLAIN) if source is None else source
    return Value(
        open=True,
        source=top,
        loops=frozenset().union(*(value.loops for value in values)),
        settings=frozenset().union(*(value.settings for value in values)),
    )


def join(values: Iterable[Value]) -> Value:
    """The value that may be any of these."""
    distinct = list(dict.fromkeys(values))
    if len(distinct) == 1:
        return distinct[0]
    atoms: frozenset[Atom] = frozenset().union(*(value.atoms for value in distinct))
    too_many = len(atoms) > _MOST_ATOMS
    return Value(
        atoms=frozenset() if too_many else atoms,
        open=too_many or any(value.open for value in distinct),
        source=max((value.source for value in distinct), default=Source.PLAIN),
        picked=any(value.picked for value in distinct),
        loops=frozenset().union(*(value.loops for value in distinct)),
        settings=frozenset().union(*(value.settings for value in distinct)),
    )


def leaves(value: Value, depth: int = 4) -> Iterator[Known | Bound | Closure]:
    """The real objects and callables in a value, also inside its lists and dictionaries."""
    for atom in value.atoms:
        if isinstance(atom, Known | Bound | Closure):
            yield atom
        elif depth:
            for inner in _inside(atom):
                yield from leaves(inner, depth - 1)


def _inside(atom: Atom) -> Iterable[Value]:
    if isinstance(atom, Sequence):
        return atom.items
    if isinstance(atom, Mapping):
        return [inner for _, inner in atom.items]
    if isinstance(atom, Many):
        return [atom.element]
    if isinstance(atom, Partial):
        return [atom.callee, *atom.positional, *(inner for _, inner in atom.keywords)]
    return ()
