"""Flatten a nested state dict to the names that Distributed Checkpoint gives its leaves. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.checkpointing.pickles.pickle_machine import Record, Symbol
from shardwise.checkpointing.pickles.torch_refs import DTensorRef, ShardedRef, TensorRef
from shardwise.errors import CheckpointError

Ref = TensorRef | ShardedRef | DTensorRef
KeyPath = tuple[str | int, ...]
_TENSORS = (TensorRef, ShardedRef, DTensorRef)
_MAX_DEPTH = 64
_MAX_REVISITS = 200_000


@dataclass(slots=True)
class FlatState:
    """The leaves of a nested state dict, by flat name."""

    tensors: dict[str, Ref] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    """Plain Python values: numbers, text, bytes, None, and lists, tuples, sets and dictionaries of them."""
    structure: dict[str, KeyPath] = field(default_factory=dict)
    """Flat name to the path it came from."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Flat name to the class of a value that is no plain data (a scheduler object, a numpy array)."""


def flatten_state(tree: Any, *, where: str = "") -> FlatState:
    """Flatten what `read_torch_pickle` returned, with the names DCP would give.

    Dictionaries are always entered, lists where they hold a tensor or a dictionary; anything else is a leaf.

    Args:
        tree: A dictionary.
        where: The file, for messages.

    Raises:
        CheckpointError: It is no dictionary, is nested without end, or two leaves get the same name.

    Ranks:
        Local.
    """
    if not isinstance(tree, Mapping):
        raise _not_a_state(where, f"it holds a {type(tree).__name__}, not a dictionary of tensors")
    flat = FlatState()
    walk = _Walk()
    for path, leaf in _leaves((), tree, walk, where):
        name = ".".join(map(str, path))
        if name in flat.structure:
            raise _not_a_state(where, f"two of its values are called {name}")
        flat.structure[name] = path
        if isinstance(leaf, _TENSORS):
            flat.tensors[name] = leaf
            continue
        try:
            flat.values[name] = _plain(leaf, walk, 0)
        except _Opaque as opaque:
            flat.left_out[name] = str(opaque)
            del flat.structure[name]
    return flat


def plain_value(value: Any, *, where: str = "") -> Any:
    """What `read_torch_pickle` returned, if it is plain data.

    Raises:
        CheckpointError: It holds an object of some class, or a tensor.
    """
    try:
        return _plain(value, _Walk(), 0)
    except _Opaque as opaque:
        raise CheckpointError(
            f"the value is no plain data but holds {opaque}",
            where=where,
            why="objects of other classes are never made from a checkpoint, since that can run code",
            fix="leave it out, or save it as numbers, text, lists and dictionaries",
        ) from None


class _Walk:
    """Containers seen on one walk: a pickle may share them, so that a small one can hold endless paths."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._revisits = 0
        self._without_tensors: set[int] = set()

    def is_endless(self, container: Any, depth: int) -> bool:
        """Whether this container, met at this depth, shows that the walk would not end."""
        if id(container) in self._seen:
            self._revisits += 1
        self._seen.add(id(container))
        return depth > _MAX_DEPTH or self._revisits > _MAX_REVISITS

    def is_entered(self, value: Any) -> bool:
        """Whether DCP gives the items of a list names of their own: where a tensor or dictionary is among them."""
        if not isinstance(value, (list, tuple)) or id(value) in self._without_tensors:
            return False
        self._without_tensors.add(id(value))  # also for a list that holds itself
        entered = any(
            isinstance(entry, (*_TENSORS, Mapping)) or (isinstance(entry, list) and self.is_entered(entry))
            for entry in value
        )
        if entered:
            self._without_tensors.discard(id(value))
        return entered


def _leaves(path: KeyPath, value: Any, walk: _Walk, where: str) -> Iterator[tuple[KeyPath, Any]]:
    is_mapping = isinstance(value, Mapping)
    if not is_mapping and not walk.is_entered(value):
        yield path, value
        return
    if walk.is_endless(value, len(path)):
        raise _not_a_state(where, "it is nested without end")
    for key, entry in value.items() if is_mapping else enumerate(value):
        yield from _leaves((*path, _key(key) if is_mapping else key), entry, walk, where)


def _key(key: Any) -> str:
    return key.name if isinstance(key, Symbol) else str(key) if isinstance(key, (str, int, float)) else repr(key)


class _Opaque(Exception):
    """The name of a class whose objects are no plain data."""


def _plain(value: Any, walk: _Walk, depth: int) -> Any:
    if value is None or isinstance(value, (str, int, float, complex, bytes)):
        return value
    if isinstance(value, Symbol):
        return value.name
    if walk.is_endless(value, depth):
        raise _Opaque("a value nested without end")
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(_plain(entry, walk, depth + 1) for entry in value)
    if isinstance(value, dict):
        return {_plain(key, walk, depth + 1): _plain(entry, walk, depth + 1) for key, entry in value.items()}
    if isinstance(value, Record) and value.name == "argparse.Namespace":
        return _plain(value.fields, walk, depth + 1)
    raise _Opaque(value.name if isinstance(value, Record) else type(value).__name__)


def _not_a_state(where: str, why: str) -> CheckpointError:
    return CheckpointError(
        "the file is not a state dict",
        where=where,
        why=why,
        fix="save a dictionary of tensors, such as model.state_dict(), and read that",
    )
