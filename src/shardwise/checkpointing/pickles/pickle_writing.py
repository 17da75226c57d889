"""Write the pickles that torch reads, without torch: plain values, and calls of functions that are only named.

Protocol 2, which is all that `torch.load(weights_only=True)` understands. Reading is `safe_pickle.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwise.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function, by name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """What the function returns for these arguments."""

    function: Global
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Instance:
    """An object made without `__init__` and given this state."""

    kind: Global
    state: Any


@dataclass(frozen=True, slots=True)
class Persistent:
    """What the reader knows under this identity: for torch, a storage."""

    identity: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Pairs:
    """A dictionary whose keys are themselves objects that only the reader can make."""

    pairs: tuple[tuple[Any, Any], ...]


def dumps(value: Any) -> bytes:
    """The pickle of `value`.

    Args:
        value: None, numbers, text, bytes, lists, tuples, sets, dictionaries, and the classes of this module.

    Raises:
        CheckpointError: Something in it is of another type.
    """
    encoder = _Encoder()
    encoder.put(value)
    return b"\x80\x02" + b"".join(encoder.parts) + b"."


class _Encoder:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._memo: dict[Any, bytes] = {}

    def put(self, value: Any) -> None:
        """Append the opcodes that leave `value` on the reader's stack."""
        # By exact type: an IntEnum or a str subclass would come back as something else.
        if (method := _METHODS.get(type(value))) is None:
            raise CheckpointError(
                f"cannot store a value of type {type(value).__module__}.{type(value).__qualname__}",
                why="a checkpoint holds tensors and plain Python values only, so that reading one runs no code",
                fix="turn it into numbers, text, lists, dictionaries or tensors in your state_dict()",
            )
        method(self, value)

    def _remembered(self, key: Any, write: Callable[[], None]) -> None:
        """Write `key` the first time, refer to it from then on."""
        if (reference := self._memo.get(key)) is not None:
            self.parts.append(reference)
            return
        write()
        index = len(self._memo)
        short = index < 256
        self.parts.append(b"q" + bytes([index]) if short else b"r" + struct.pack("<I", index))
        self._memo[key] = b"h" + bytes([index]) if short else b"j" + struct.pack("<I", index)

    def _none(self, value: None) -> None:
        self.parts.append(b"N")

    def _bool(self, value: bool) -> None:
        self.parts.append(b"\x88" if value else b"\x89")

    def _int(self, value: int) -> None:
        if 0 <= value < 256:
            self.parts.append(b"K" + bytes([value]))
        elif -(1 << 31) <= value < 1 << 31:
            self.parts.append(b"J" + struct.pack("<i", value))
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(data) < 256:
                self.parts.append(b"\x8a" + bytes([len(data)]) + data)
            else:
                self.parts.append(b"\x8b" + struct.pack("<i", len(data)) + data)

    def _float(self, value: float) -> None:
        self.parts.append(b"G" + struct.pack(">d", value))

    def _str(self, value: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        self._remembered(value, lambda: self.parts.append(b"X" + struct.pack("<I", len(data)) + data))

    def _bytes(self, value: bytes) -> None:
        self._call(Call(Global("_codecs", "encode"), (value.decode("latin1"), "latin1")))

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if not value:
            self.parts.append(b")")
            return
        if len(value) > 3:
            self.parts.append(b"(")
        for each in value:
            self.put(each)
        self.parts.append({1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(value), b"t"))

    def _list(self, value: list[Any]) -> None:
        self.parts.append(b"]")
        if value:
            self.parts.append(b"(")
            for each in value:
                self.put(each)
            self.parts.append(b"e")

    def _dict(self, value: dict[Any, Any]) -> None:
        self._pairs(Pairs(tuple(value.items())))

    def _pairs(self, value: Pairs) -> None:
        self.parts.append(b"}")
        if value.pairs:
            self.parts.append(b"(")
            for key, each in value.pairs:
                self.put(key)
                self.put(each)
            self.parts.append(b"u")

    def _set(self, value: set[Any]) -> None:
        self._call(Call(Global("builtins", "set"), (list(value),)))

    def _global(self, value: Global) -> None:
        self._remembered(value, lambda: self.parts.append(f"c{value.module}\n{value.name}\n".encode()))

    def _call(self, value: Call) -> None:
        self._global(value.function)
        self._tuple(value.arguments)
        self.parts.append(b"R")

    def _instance(self, value: Instance) -> None:
        self._global(value.kind)
        self.parts.append(b")\x81")
        self.put(value.state)
        self.parts.append(b"b")

    def _persistent(self, value: Persistent) -> None:
        self._tuple(value.identity)
        self.parts.append(b"Q")


_METHODS: dict[type, Callable[[_Encoder, Any], None]] = {
    type(None): _Encoder._none,
    bool: _Encoder._bool,
    int: _Encoder._int,
    float: _Encoder._float,
    str: _Encoder._str,
    bytes: _Encoder._bytes,
    tuple: _Encoder._tuple,
    list: _Encoder._list,
    dict: _Encoder._dict,
    set: _Encoder._set,
    Global: _Encoder._global,
    Call: _Encoder._call,
    Instance: _Encoder._instance,
    Persistent: _Encoder._persistent,
    Pairs: _Encoder._pairs,
}
