"""A pickle reader that builds data only: no import, no call, every limit checked."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from shardwise.checkpointing.storage.files import damaged
from shardwise.errors import CheckpointError

MAX_PICKLE_BYTES = 256 << 20
_FREE_OBJECTS = 1 << 16
_KEYS = (str, int, float, bytes, type(None))


@dataclass(frozen=True, eq=False, slots=True)
class Symbol:
    """A name from a pickle: of a dtype, a class, a function. What it names is never looked up."""

    name: str
    make: Callable[..., Any] | None = field(default=None, repr=False)


@dataclass(eq=False, repr=False, slots=True)
class Record:
    """What a pickle says about an object of a known class: its arguments and its state, as plain values."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    state: Any = None
    items: list[Any] = field(default_factory=list)
    """What the pickle appends to it, for subclasses of list."""
    pairs: list[tuple[Any, Any]] = field(default_factory=list)
    """What the pickle sets in it, for subclasses of dict."""

    @property
    def fields(self) -> dict[str, Any]:
        """Its attributes by name; empty when the state is of another shape."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2 and state[0] is None:  # (no __dict__, the __slots__)
            state = state[1]
        return state if isinstance(state, dict) else {}


class Refused(Exception):
    """The pickle asks for what no checkpoint needs."""


# The unpickler in Python, whose instructions can be replaced; stubs know only the one in C.
_PythonUnpickler: Any = vars(pickle)["_Unpickler"]


class _Unpickler(_PythonUnpickler):
    """Python's own, without the instructions that no checkpoint needs, and with the ones that call replaced."""

    def __init__(
        self,
        data: bytes,
        allowed: Mapping[str, Symbol],
        records: tuple[str, ...],
        persistent_load: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(_Whole(data))
        self._allowed, self._records, self._persistent_load = allowed, records, persistent_load
        # A byte of pickle can ask for a container of 200; real ones have fewer than one object in four bytes.
        self.objects_left = _FREE_OBJECTS + len(data) // 3

    def find_class(self, module: str, name: str) -> Symbol:
        """The symbol that stands for a name; nothing is imported."""
        full = f"{module}.{name}"
        if full in self._allowed:
            return self._allowed[full]
        if full.startswith(self._records):
            return record(full)
        raise Refused(f"the pickle asks for '{full}', which no checkpoint needs")

    def persistent_load(self, pid: Any) -> Any:
        """What stands for a storage."""
        if self._persistent_load is None:
            raise Refused("the pickle refers to storages outside it, which this file cannot have")
        return self._persistent_load(pid)

    def make(self, symbol: Any, args: Any, kwargs: Any) -> None:
        """What a call leaves: a record, or what our own function returns."""
        if not isinstance(symbol, Symbol) or symbol.make is None:
            raise Refused(f"the pickle calls {symbol!r}, which may only be named")
        if not isinstance(args, tuple):
            raise ValueError("arguments that are not a tuple")
        self.append(symbol.make(*args, **kwargs))

    def set_items(self, values: list[Any]) -> None:
        """Set keys and values, one after another, in the dictionary or record on the stack."""
        target = self.stack[-1]
        pairs = list(zip(values[::2], values[1::2], strict=True))
        if isinstance(target, Record):
            target.pairs.extend(pairs)
        elif type(target) is dict:
            target.update((_checked_key(key), value) for key, value in pairs)
        else:
            raise ValueError(f"items set in a {type(target).__name__}")

    def append_items(self, values: list[Any]) -> None:
        """Append to the list or record on the stack."""
        target = self.stack[-1]
        if not isinstance(target, (Record, list)):
            raise ValueError(f"items appended to a {type(target).__name__}")
        (target.items if isinstance(target, Record) else target).extend(values)

    def add_items(self, values: list[Any]) -> None:
        """Add to the set on the stack."""
        if type(self.stack[-1]) is not set:
            raise ValueError(f"elements added to a {type(self.stack[-1]).__name__}")
        self.stack[-1].update(map(_checked_key, values))

    def set_state(self, state: Any) -> None:
        """Note the state of the record on the stack."""
        if isinstance(self.stack[-1], Record):
            self.stack[-1].state = state
        elif type(self.stack[-1]) is not dict:  # an OrderedDict's attributes (`_metadata` of a state dict)
            raise ValueError(f"state given to a {type(self.stack[-1]).__name__}")

    def new_frozenset(self, values: list[Any]) -> None:
        """A set of values; marks change where `append` appends to, so that they must be popped first."""
        self.append(frozenset(map(_checked_key, values)))

    def new_dict(self, values: list[Any]) -> None:
        """A dictionary of keys and values, one after another."""
        self.append({})
        self.set_items(values)


class _Whole(io.BytesIO):
    """Bytes that are never read beyond their end."""

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if size is not None and len(data) < size:
            raise ValueError("it ends in the middle of a value")
        return data


def _checked_key(key: Any) -> Any:
    # Hashing a tuple of tuples of tuples visits every path to every leaf: a few hundred bytes can take years.
    is_flat_tuple = isinstance(key, tuple) and all(isinstance(part, _KEYS) for part in key)
    if not is_flat_tuple and not isinstance(key, (*_KEYS, Symbol, Record)):
        raise ValueError(f"a dictionary key that is a {type(key).__name__}")
    return key


def _reduce(machine: _Unpickler) -> None:
    args, symbol = machine.stack.pop(), machine.stack.pop()
    machine.make(symbol, args, {})


def _new_with_keywords(machine: _Unpickler) -> None:
    kwargs, args, symbol = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    machine.make(symbol, args, kwargs)


def _counted(step: Callable[[_Unpickler], None]) -> Callable[[_Unpickler], None]:
    def counted(machine: _Unpickler) -> None:
        machine.objects_left -= 1
        if machine.objects_left < 0:
            raise ValueError("it asks for too many objects")
        step(machine)

    return counted


class _Instructions(dict[int, Callable[[Any], Any]]):
    def __missing__(self, opcode: int) -> Any:
        raise Refused(f"the pickle uses the instruction {opcode:#04x}, which no checkpoint needs")


_TAKEN_OVER = b"(012N)}]JKMGXBCltQchjqr\x80\x85\x86\x87\x88\x89\x8a\x8c\x8d\x8e\x8f\x93\x94\x95."
"""Instructions that only read data, make containers, and use the stack and the memo; and those that look names up."""
_REPLACED: dict[str, Callable[[_Unpickler], None]] = {
    "REDUCE": _reduce,
    "NEWOBJ": _reduce,  # the same for us
    "NEWOBJ_EX": _new_with_keywords,
    "BUILD": lambda machine: machine.set_state(machine.stack.pop()),
    "APPEND": lambda machine: machine.append_items([machine.stack.pop()]),
    "APPENDS": lambda machine: machine.append_items(machine.pop_mark()),
    "SETITEM": lambda machine: machine.set_items([machine.stack.pop(), machine.stack.pop()][::-1]),
    "SETITEMS": lambda machine: machine.set_items(machine.pop_mark()),
    "DICT": lambda machine: machine.new_dict(machine.pop_mark()),
    "ADDITEMS": lambda machine: machine.add_items(machine.pop_mark()),
    "FROZENSET": lambda machine: machine.new_frozenset(machine.pop_mark()),
}
_COUNTED = b"}]ltdQRqr\x81\x85\x86\x87\x8f\x91\x92\x94"
"""Instructions that make an object, or a place in the memo."""


def _instructions() -> _Instructions:
    steps = {opcode: _Unpickler.dispatch[opcode] for opcode in _TAKEN_OVER}
    steps |= {getattr(pickle, name)[0]: step for name, step in _REPLACED.items()}
    return _Instructions(steps | {opcode: _counted(steps[opcode]) for opcode in _COUNTED})


_Unpickler.dispatch = _instructions()


def record(name: str) -> Symbol:
    """What stands for a class: its objects become `Record`s."""
    return Symbol(name, lambda *args, **kwargs: Record(name, args, kwargs))


def symbols(*names: str) -> dict[str, Symbol]:
    """Table entries for names that may be mentioned but not called, such as dtypes."""
    return {name: Symbol(name) for name in names}


def makers(functions: Mapping[str, Callable[..., Any]]) -> dict[str, Symbol]:
    """Table entries for constructors, by qualified name, that we replace by functions of our own."""
    return {name: Symbol(name, make) for name, make in functions.items()}


def load_pickle(
    data: bytes | bytearray | memoryview | BinaryIO,
    *,
    allowed: Mapping[str, Symbol],
    records: tuple[str, ...] = (),
    persistent_load: Callable[[Any], Any] | None = None,
    where: str = "",
    max_bytes: int = MAX_PICKLE_BYTES,
) -> Any:
    """Read one pickle without importing or calling anything it names.

    Args:
        data: The pickle, or a file that holds nothing else from here on.
        allowed: Qualified name to what stands for it here; see `symbols` and `makers`.
        records: Beginnings of the qualified names of classes whose objects are kept as `Record`s.
        persistent_load: Turns a persistent id (torch's storages) into a value; without it they are refused.
        where: The file, for messages.
        max_bytes: Larger pickles are refused unread.

    Returns:
        Plain values, `Symbol`s, `Record`s and what the table's functions and `persistent_load` returned. Values
        may be shared or cyclic: walk them with a limit.

    Raises:
        CheckpointError: It names something that is not allowed, is damaged, or is too large.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        data = data.read(max_bytes + 1)
    if len(data) > max_bytes:
        what = f"the checkpoint holds a pickle of more than {max_bytes} bytes"
        raise damaged(what, where, "no checkpoint needs one so large")
    try:
        return _Unpickler(bytes(data), allowed, records, persistent_load).load()
    except Refused as refusal:
        raise CheckpointError(
            str(refusal),
            where=where,
            why="a pickle can run any code; only names that checkpoints need are known here, and none is ever called",
            fix="get the file again from a source you trust; if you trust it as it is, load it with torch yourself "
            "and save it anew (save_weights, or safetensors)",
        ) from None
    except (pickle.UnpicklingError, IndexError, struct.error, ValueError, TypeError, KeyError, AttributeError) as error:
        what = "the checkpoint holds a pickle that cannot be read"
        raise damaged(what, where, str(error) or type(error).__name__) from None
