"""What fields JSON has: each path to a value, with the types of the values found there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

_TYPES = {dict: "object", list: "list", str: "string", bool: "boolean", int: "integer", float: "number"}


def shape_of(values: Iterable[Any], *, maps: tuple[str, ...] = (), opaque: tuple[str, ...] = ()) -> dict[str, str]:
    """The fields of one or several values of the same kind.

    Args:
        values: Parsed JSON.
        maps: Paths to objects whose keys are data (names of tensors, say); a key becomes `*`.
        opaque: Paths below which nothing is promised.

    Returns:
        Path to types: `{"findings[].line": "integer"}`. A field that not every object has is marked with `?`.
    """
    types: dict[str, set[str]] = {}
    seen: dict[str, int] = {}
    objects: dict[str, int] = {}
    for value in values:
        for path, kind in _walk("", value, maps, opaque):
            types.setdefault(path, set()).add(kind)
            seen[path] = seen.get(path, 0) + 1
            objects[path] = objects.get(path, 0) + (kind == "object")
    return {
        path + ("?" if _is_sometimes(path, seen, objects) else ""): " or ".join(sorted(kinds))
        for path, kinds in types.items()
        if path
    }


def _walk(path: str, value: Any, maps: tuple[str, ...], opaque: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    yield path, "null" if value is None else _TYPES[type(value)]
    if path in opaque:
        return
    if isinstance(value, dict):
        is_map = path in maps
        for name, part in value.items():
            yield from _walk(f"{path}.{'*' if is_map else name}".lstrip("."), part, maps, opaque)
    elif isinstance(value, list):
        for part in value:
            yield from _walk(f"{path}[]", part, maps, opaque)


def _is_sometimes(path: str, seen: dict[str, int], objects: dict[str, int]) -> bool:
    parent, _, name = path.rpartition(".")
    if path.endswith("[]") or name == "*":
        return False
    return seen[path] < objects.get(parent, 0)
