"""A pickle reader that builds data only: no import, no call, every limit checked."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from shardwise.errors import CheckpointError

_FREE_OBJECTS = 1 << 16
_MAX_INT_BYTES = 16
_KEYS = (str, int, float, bytes, type(None))


class Symbol:
    """A name from a pickle: of a dtype, a class, a function. What it names is never looked up."""

    __slots__ = ("make", "name")

    def __init__(self, name: str, make: Callable[..., Any] | None = None) -> None:
        self.name = name
        self.make = make

    def __repr__(self) -> str:
        return f"Symbol({self.name!r})"


class Record:
    """What a pickle says about an object of a known class: its arguments and its state, as plain values."""

    __slots__ = ("args", "items", "kwargs", "name", "pairs", "state")

    def __init__(self, name: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        self.name = name
        self.args = args
        self.kwargs = kwargs or {}
        self.state: Any = None
        self.items: list[Any] = []
        """What the pickle appends to it, for subclasses of list."""
        self.pairs: list[tuple[Any, Any]] = []
        """What the pickle sets in it, for subclasses of dict."""

    def __repr__(self) -> str:
        return f"Record({self.name!r}, args={self.args!r})"

    @property
    def fields(self) -> dict[str, Any]:
        """Its attributes by name; empty when the state is of another shape."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2 and state[0] is None:  # (no __dict__, the __slots__)
            state = state[1]
        return state if isinstance(state, dict) else {}


class Refused(Exception):
    """The pickle asks for what no checkpoint needs."""


class Damaged(Exception):
    """The pickle is cut off or inconsistent."""


def run_pickle(data: bytes, allowed: Mapping[str, Symbol], persistent_load: Callable[[Any], Any] | None = None) -> Any:
    """Carry a pickle out and return what it leaves.

    Args:
        data: The pickle.
        allowed: What each name stands for.
        persistent_load: Turns a persistent id into a value.

    Raises:
        Refused: It asks for what no checkpoint needs.
        Damaged: It is no whole pickle; as are IndexError, ValueError, TypeError, KeyError, AttributeError and
            struct.error, which reading past the end or out of order gives.
    """
    return _Machine(data, allowed, persistent_load).run()


class _Machine:
    """One run over one pickle."""

    def __init__(
        self, data: bytes, allowed: Mapping[str, Symbol], persistent_load: Callable[[Any], Any] | None
    ) -> None:
        self.data = data
        self.at = 0
        self.allowed = allowed
        self.persistent_load = persistent_load
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        # A byte of pickle can ask for a container of 200; real ones have fewer than one object in four bytes.
        self.objects_left = _FREE_OBJECTS + len(data) // 2

    def run(self) -> Any:
        data, dispatch = self.data, _DISPATCH
        while True:
            opcode = data[self.at]
            self.at += 1
            if opcode == 0x2E:  # STOP
                return self.stack.pop()
            step = dispatch.get(opcode)
            if step is None:
                raise Refused(f"the pickle uses the instruction {opcode:#04x}, which no checkpoint needs")
            step(self)

    # Reading the program

    def take(self, length: int) -> bytes:
        end = self.at + length
        if end > len(self.data):
            raise Damaged(f"it ends after {len(self.data)} bytes, in the middle of a value")
        part = self.data[self.at : end]
        self.at = end
        return part

    def number(self, layout: struct.Struct) -> Any:
        (value,) = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return value

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text

    # The stack

    def count(self, objects: int = 1) -> None:
        self.objects_left -= objects
        if self.objects_left < 0:
            raise Damaged(f"its {len(self.data)} bytes ask for too many objects")

    def container(self, value: Any) -> None:
        self.count()
        self.stack.append(value)

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def remember(self, index: int) -> None:
        self.count()
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        self.stack.append(self.memo[index])

    # What values do

    def name(self, module: Any, qualified: Any) -> None:
        name = f"{module}.{qualified}"
        symbol = self.allowed.get(name)
        if symbol is None:
            raise Refused(f"the pickle asks for {name!r}, which no checkpoint needs")
        self.stack.append(symbol)

    def make(self, symbol: Any, args: Any, kwargs: Any = None) -> None:
        if not isinstance(symbol, Symbol) or symbol.make is None:
            raise Refused(f"the pickle calls {symbol!r}, which may only be named")
        if not isinstance(args, tuple):
            raise Damaged("arguments that are no tuple")
        self.container(symbol.make(*args, **(kwargs or {})))

    def set_pairs(self, target: Any, values: list[Any]) -> None:
        if len(values) % 2:
            raise Damaged("a key without a value")
        pairs = zip(values[::2], values[1::2], strict=True)
        if isinstance(target, Record):
            target.pairs.extend(pairs)
            return
        if type(target) is not dict:
            raise Damaged(f"items set in a {type(target).__name__}")
        for key, value in pairs:
            _check_key(key)
            target[key] = value

    def append(self, target: Any, values: list[Any]) -> None:
        if isinstance(target, Record):
            target.items.extend(values)
        elif type(target) is list:
            target.extend(values)
        else:
            raise Damaged(f"items appended to a {type(target).__name__}")

    def build(self, target: Any, state: Any) -> None:
        if isinstance(target, Record):
            target.state = state
        elif type(target) is not dict:  # an OrderedDict's attributes (`_metadata` of a state dict) are of no use
            raise Damaged(f"state given to a {type(target).__name__}")

    def persistent(self, identity: Any) -> None:
        if self.persistent_load is None:
            raise Refused("the pickle refers to storages outside it, which this file cannot have")
        self.container(self.persistent_load(identity))


def _check_key(key: Any) -> None:
    # Hashing a tuple of tuples of tuples visits every path to every leaf: a few hundred bytes can take years.
    if isinstance(key, tuple) and all(isinstance(part, _KEYS) for part in key):
        return
    if not isinstance(key, (*_KEYS, Symbol, Record)):
        raise Damaged(f"a dictionary key that is a {type(key).__name__}")


def _set_of(machine: _Machine, values: list[Any]) -> list[Any]:
    for value in values:
        _check_key(value)
    machine.count(len(values))
    return values


def _integer(machine: _Machine, length: int) -> None:
    if not 0 <= length <= _MAX_INT_BYTES:
        raise Damaged(f"an integer of {length} bytes")
    machine.stack.append(int.from_bytes(machine.take(length), "little", signed=True))


def _tuple_of_last(machine: _Machine, length: int) -> None:
    values = tuple(machine.stack[-length:])
    if len(values) < length:
        raise Damaged("a tuple without its elements")
    del machine.stack[-length:]
    machine.container(values)


def _named_by_stack(machine: _Machine) -> None:
    qualified, module = machine.stack.pop(), machine.stack.pop()
    if not (isinstance(module, str) and isinstance(qualified, str)):
        raise Damaged("a name that is no text")
    machine.name(module, qualified)


def _reduce(machine: _Machine) -> None:
    args, symbol = machine.stack.pop(), machine.stack.pop()
    machine.make(symbol, args)


def _new_with_keywords(machine: _Machine) -> None:
    kwargs, args, symbol = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    machine.make(symbol, args, kwargs)


def _append_one(machine: _Machine) -> None:
    value = machine.stack.pop()
    machine.append(machine.stack[-1], [value])


def _append_many(machine: _Machine) -> None:
    values = machine.since_mark()
    machine.append(machine.stack[-1], values)


def _set_one(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.set_pairs(machine.stack[-1], [key, value])


def _set_many(machine: _Machine) -> None:
    values = machine.since_mark()
    machine.set_pairs(machine.stack[-1], values)


def _dict_since_mark(machine: _Machine) -> None:
    values = machine.since_mark()
    machine.container({})
    machine.set_pairs(machine.stack[-1], values)


def _add_to_set(machine: _Machine) -> None:
    values = machine.since_mark()
    target = machine.stack[-1]
    if type(target) is not set:
        raise Damaged(f"elements added to a {type(target).__name__}")
    target.update(_set_of(machine, values))


def _build(machine: _Machine) -> None:
    state = machine.stack.pop()
    machine.build(machine.stack[-1], state)


def _text(machine: _Machine, length: int) -> None:
    machine.stack.append(machine.take(length).decode("utf-8", "surrogatepass"))


def _push(value: Any) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(value)


_U1, _U2, _U4, _U8 = (struct.Struct(f"<{code}") for code in "BHIQ")
_I4, _F8 = struct.Struct("<i"), struct.Struct(">d")

_DISPATCH: dict[int, Callable[[_Machine], Any]] = {
    ord("("): lambda m: m.marks.append(len(m.stack)),
    ord("0"): lambda m: m.stack.pop(),
    ord("1"): lambda m: m.since_mark(),
    ord("2"): lambda m: m.stack.append(m.stack[-1]),
    ord("N"): _push(None),
    ord(")"): _push(()),
    ord("}"): lambda m: m.container({}),
    ord("]"): lambda m: m.container([]),
    ord("J"): lambda m: m.stack.append(m.number(_I4)),
    ord("K"): lambda m: m.stack.append(m.number(_U1)),
    ord("M"): lambda m: m.stack.append(m.number(_U2)),
    ord("G"): lambda m: m.stack.append(m.number(_F8)),
    ord("X"): lambda m: _text(m, m.number(_U4)),
    ord("B"): lambda m: m.stack.append(m.take(m.number(_U4))),
    ord("C"): lambda m: m.stack.append(m.take(m.number(_U1))),
    ord("a"): _append_one,
    ord("e"): _append_many,
    ord("s"): _set_one,
    ord("u"): _set_many,
    ord("d"): _dict_since_mark,
    ord("l"): lambda m: m.container(m.since_mark()),
    ord("t"): lambda m: m.container(tuple(m.since_mark())),
    ord("b"): _build,
    ord("R"): _reduce,
    ord("Q"): lambda m: m.persistent(m.stack.pop()),
    ord("c"): lambda m: m.name(m.line(), m.line()),
    ord("h"): lambda m: m.recall(m.number(_U1)),
    ord("j"): lambda m: m.recall(m.number(_U4)),
    ord("q"): lambda m: m.remember(m.number(_U1)),
    ord("r"): lambda m: m.remember(m.number(_U4)),
    0x80: lambda m: m.number(_U1),  # PROTO
    0x81: _reduce,  # NEWOBJ: the same for us
    0x85: lambda m: _tuple_of_last(m, 1),
    0x86: lambda m: _tuple_of_last(m, 2),
    0x87: lambda m: _tuple_of_last(m, 3),
    0x88: _push(True),
    0x89: _push(False),
    0x8A: lambda m: _integer(m, m.number(_U1)),
    0x8B: lambda m: _integer(m, m.number(_I4)),
    0x8C: lambda m: _text(m, m.number(_U1)),
    0x8D: lambda m: _text(m, m.number(_U8)),
    0x8E: lambda m: m.stack.append(m.take(m.number(_U8))),
    0x8F: lambda m: (m.count(3), m.container(set())),
    0x90: _add_to_set,
    0x91: lambda m: m.container(frozenset(_set_of(m, m.since_mark()))),
    0x92: _new_with_keywords,
    0x93: _named_by_stack,
    0x94: lambda m: m.remember(len(m.memo)),
    0x95: lambda m: m.number(_U8),  # FRAME: a hint for buffered readers
    0x96: lambda m: m.stack.append(m.take(m.number(_U8))),
}


MAX_PICKLE_BYTES = 256 << 20


def record(name: str) -> Symbol:
    """A table entry for a class: its objects become `Record`s."""
    return Symbol(name, lambda *args, **kwargs: Record(name, args, kwargs))


def symbols(*names: str) -> dict[str, Symbol]:
    """Table entries for names that may be mentioned but not called, such as dtypes."""
    return {name: Symbol(name) for name in names}


def records(*names: str) -> dict[str, Symbol]:
    """Table entries for classes whose objects are kept as `Record`s."""
    return {name: record(name) for name in names}


def makers(functions: Mapping[str, Callable[..., Any]]) -> dict[str, Symbol]:
    """Table entries for constructors, by qualified name, that we replace by functions of our own."""
    return {name: Symbol(name, make) for name, make in functions.items()}


def load_pickle(
    data: bytes | bytearray | memoryview | BinaryIO,
    *,
    allowed: Mapping[str, Symbol],
    persistent_load: Callable[[Any], Any] | None = None,
    where: str = "",
    max_bytes: int = MAX_PICKLE_BYTES,
) -> Any:
    """Read one pickle without importing or calling anything it names.

    Args:
        data: The pickle, or a file that holds nothing else from here on.
        allowed: Qualified name to what stands for it here; see `symbols`, `records`, `makers`.
        persistent_load: Turns a persistent id (torch's storages) into a value; without it they are refused.
        where: The file, for messages.
        max_bytes: Larger pickles are refused unread.

    Returns:
        Plain values, `Symbol`s, `Record`s and what the table's functions and `persistent_load` returned. Values
        may be shared or cyclic: walk them with a limit.

    Raises:
        CheckpointError: It names something that is not allowed, is damaged, or is too large.

    Ranks:
        Local.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        data = data.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise _damaged(where, f"a pickle of more than {max_bytes} bytes", "no checkpoint needs one so large")
    try:
        return run_pickle(bytes(data), allowed, persistent_load)
    except Refused as refusal:
        raise CheckpointError(
            str(refusal),
            where=where,
            why="a pickle can run any code; only names that checkpoints need are known here, and none is ever called",
            fix="get the file again from a source you trust; if you trust it as it is, load it with torch yourself "
            "and save it anew (save_weights, or safetensors)",
        ) from None
    except (Damaged, IndexError, struct.error, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(where, "a pickle that cannot be read", f"{error or type(error).__name__}") from None


def _damaged(where: str, what: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint holds {what}",
        where=where,
        why=why,
        fix="restore the file from a copy, or use another checkpoint",
    )
