"""Values other than tensors, encoded as JSON, and nested values built from their leaves. No torch."""

from __future__ import annotations

import base64
import enum
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwise.checkpointing.contents import KeyPath
from shardwise.errors import CheckpointError

_TAG = "$"
"""Key that marks an encoded value of a type that JSON lacks, as in `{"$": "tuple", "of": [1, 2]}`."""
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, deque, Counter, OrderedDict)
}
"""Supported default factories of a defaultdict, by name."""
_SPECIAL_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode_value(value: object, where: str = "") -> Any:
    """Encode `value` as JSON; raise unless it is plain, or a small value of NumPy or torch."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_TAG: "float", "of": repr(value)}
    if type(value) is list:
        return [encode_value(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        kind = mapping_type(value)
        if not kind and all(type(key) is str for key in value) and _TAG not in value:
            return {key: encode_value(item, f"{where}.{key}") for key, item in value.items()}
        pairs = [[encode_value(key, where), encode_value(item, f"{where}.{key}")] for key, item in value.items()]
        return {_TAG: "mapping", "of": pairs, **kind}
    if type(value).__name__ == "Size" and type(value).__module__ == "torch":
        return {_TAG: "torch.Size", "of": list(value)}  # pyrefly: ignore[bad-argument-type]
    if isinstance(value, tuple | set | frozenset):
        items = [encode_value(item, f"{where}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, tuple):
            return {_TAG: "tuple", "of": items}
        return {_TAG: "set" if isinstance(value, set) else "frozenset", "of": sorted(items, key=repr)}
    if type(value) is deque:
        items = [encode_value(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return {_TAG: "deque", "of": items, "maxlen": value.maxlen}
    if isinstance(value, Path):
        return {_TAG: "path", "of": str(value)}
    if isinstance(value, bytes | bytearray):
        return {_TAG: "bytes", "of": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {_TAG: "complex", "of": [encode_value(value.real), encode_value(value.imag)]}
    for kind in (str, int, float):
        if isinstance(value, kind) and not isinstance(value, enum.Enum):  # a subclass of a plain type
            return encode_value(kind(value), where)
    return _encode_foreign(value, where)


def mapping_type(value: Mapping[Any, Any]) -> dict[str, Any]:
    """Encode the type of a standard mapping other than dict; empty for other types, which are stored as a dict."""
    kind = type(value)
    if kind in (Counter, OrderedDict):
        return {"type": kind.__name__}
    if isinstance(value, defaultdict) and kind is defaultdict:
        factory = value.default_factory
        name = getattr(factory, "__name__", None)
        if factory is None or _FACTORIES.get(name or "") is factory:
            return {"type": "defaultdict", "factory": name}
    return {}


def typed_mapping(encoded: Mapping[str, Any], items: dict[Any, Any]) -> Any:
    """Return the items in a mapping of the type that `mapping_type` encoded."""
    match encoded.get("type"), encoded.get("factory"):
        case None, None:
            return items
        case "Counter", None:
            return Counter(items)
        case "OrderedDict", None:
            return OrderedDict(items)
        case "defaultdict", None:
            return defaultdict(None, items)
        case "defaultdict", str(name) if name in _FACTORIES:
            return defaultdict(_FACTORIES[name], items)
    raise unreadable_value(encoded)


def decode_value(encoded: Any) -> Any:
    """Decode the result of `encode_value`."""
    if isinstance(encoded, list):
        return [decode_value(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if _TAG not in encoded:
        return {key: decode_value(item) for key, item in encoded.items()}
    kind = encoded[_TAG]
    decode = _DECODERS.get(kind) if isinstance(kind, str) else None
    if decode is None:
        raise unreadable_value(encoded)
    try:
        return decode(encoded)
    except CheckpointError:
        raise
    except Exception as error:
        raise unreadable_value(encoded) from error


def _encode_foreign(value: object, where: str) -> Any:
    """Encode small values of NumPy and torch, without importing either."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "biufcSU":
        data = base64.b64encode(value.tobytes()).decode()
        kind = "numpy.array" if isinstance(value, numpy.ndarray) else "numpy.scalar"
        return {_TAG: kind, "dtype": value.dtype.str, "shape": list(value.shape), "of": data}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype | torch.device):
        return {_TAG: f"torch.{type(value).__name__}", "of": str(value).removeprefix("torch.")}
    raise CheckpointError(
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be stored",
        where=where,
        why="a checkpoint holds tensors and plain values (numbers, text, bytes, lists, tuples, sets, dictionaries), "
        "so that loading it never runs code",
        fix="give the object a state_dict() of tensors and plain values, or leave it out",
    )


def unreadable_value(encoded: Any, what: str = "a stored value") -> CheckpointError:
    """Return the error for an unknown encoding."""
    return CheckpointError(
        f"{what} is not readable: {str(encoded)[:120]}",
        why="it was written by a newer version, or it is damaged",
        fix="verify the checkpoint: shardwise ckpt verify PATH",
    )


def _decode_numpy(encoded: dict[str, Any]) -> Any:
    import numpy

    array = numpy.frombuffer(base64.b64decode(encoded["of"]), dtype=numpy.dtype(encoded["dtype"]))
    array = array.reshape(encoded["shape"]).copy()
    return array if encoded[_TAG] == "numpy.array" else array[()]


def _decode_torch(encoded: dict[str, Any]) -> Any:
    import torch

    if encoded[_TAG] == "torch.device":
        return torch.device(encoded["of"])
    if encoded[_TAG] == "torch.Size":
        return torch.Size(encoded["of"])
    dtype = getattr(torch, encoded["of"])
    if not isinstance(dtype, torch.dtype):
        raise unreadable_value(encoded)
    return dtype


_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "float": lambda encoded: _SPECIAL_FLOATS[encoded["of"]],
    "tuple": lambda encoded: tuple(decode_value(item) for item in encoded["of"]),
    "set": lambda encoded: {decode_value(item) for item in encoded["of"]},
    "frozenset": lambda encoded: frozenset(decode_value(item) for item in encoded["of"]),
    "bytes": lambda encoded: base64.b64decode(encoded["of"]),
    "complex": lambda encoded: complex(*(decode_value(part) for part in encoded["of"])),
    "mapping": lambda encoded: typed_mapping(
        encoded, {decode_value(key): decode_value(item) for key, item in encoded["of"]}
    ),
    "deque": lambda encoded: deque(map(decode_value, encoded["of"]), encoded["maxlen"]),
    "path": lambda encoded: Path(encoded["of"]),
    "numpy.array": _decode_numpy,
    "numpy.scalar": _decode_numpy,
    "torch.dtype": _decode_torch,
    "torch.device": _decode_torch,
    "torch.Size": _decode_torch,
}


def nest(parts: Mapping[KeyPath, Any]) -> Any:
    """Build a nested value from its leaves by path, for checkpoints without a layout; integers are list indices."""
    if set(parts) == {()}:
        return parts[()]
    children: dict[str | int, dict[KeyPath, Any]] = {}
    for path, value in parts.items():
        if not path:
            raise CheckpointError(
                "a stored name is both a value and a prefix of other names", why="names must be unique"
            )
        children.setdefault(path[0], {})[path[1:]] = value
    made = {key: nest(below) for key, below in children.items()}
    if all(isinstance(key, int) for key in made):
        return [made[key] for key in sorted(made)]
    return made
