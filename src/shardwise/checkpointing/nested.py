"""Nested containers as flat names, and the state of random number generators."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.checkpointing.contents import KeyPath
from shardwise.checkpointing.formats.values import decode_value, encode_value
from shardwise.errors import CheckpointError
from shardwise.models.random_state import random_state, seed_everything, set_random_state

LAYOUT = "__layout__"
"""Under `<object>.__layout__` stands how the names of an object fit together."""
PER_RANK = "per_rank"
"""Under `per_rank.<rank>.<name>` stands what differs from rank 0's."""


@dataclass(slots=True)
class FlatState:
    """A nested state as flat names, on this rank, as it will be stored."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """The live ones."""
    unchanged_until_step: set[str] = field(default_factory=set)
    """Tensors that nothing changes before the next optimizer step, so that copying them may take until then."""
    values: dict[str, Any] = field(default_factory=dict)
    """Encoded, hence snapshots: what changes in the object later does not change them."""
    paths: dict[str, KeyPath] = field(default_factory=dict)
    """Flat name to the keys that lead there."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of tied weights."""
    details: dict[str, Any] = field(default_factory=dict)
    """What the manifest says of the run besides; JSON."""

    def add(self, path: KeyPath, value: Any, *, unchanged_until_step: bool = False) -> str:
        """Add a tensor or an encoded value under a name that is not taken yet; return the name."""
        name = dotted(path)
        if name in self.paths:
            raise CheckpointError(
                "two things have the same name in the checkpoint",
                where=name,
                why="keys are joined by dots, and a key with a dot reads like two",
                fix="rename one of them in the object's state_dict()",
            )
        self.paths[name] = path
        if isinstance(value, torch.Tensor):
            self.tensors[name] = value
            if unchanged_until_step:
                self.unchanged_until_step.add(name)
        else:
            self.values[name] = value
        return name

    def add_object(self, state: object, path: KeyPath, *, unchanged_until_step: bool = False) -> None:
        """Add an object's state, and its layout beside it."""
        self.add((*path, LAYOUT), flatten(state, path, self, unchanged_until_step=unchanged_until_step)[1])


def dotted(path: KeyPath) -> str:
    """The flat name of what stands under these keys."""
    return ".".join(map(str, path))


def flatten(
    nested: object, path: KeyPath, into: FlatState | None = None, *, unchanged_until_step: bool = False
) -> tuple[FlatState, Any]:
    """The parts of dictionaries, lists and tuples of tensors and plain values, and their layout for `unflatten`.

    They are added to `into` where that is given.
    """
    flat = FlatState() if into is None else into

    def take(value: object, path: KeyPath) -> Any:
        if isinstance(value, torch.Tensor):
            return {"tensor": flat.add(path, value, unchanged_until_step=unchanged_until_step)}
        if isinstance(value, Mapping) and _is_taken_apart(value):
            pairs = [[encode_value(key, dotted(path)), take(item, (*path, str(key)))] for key, item in value.items()]
            return {"mapping": pairs}
        if isinstance(value, list | tuple) and _is_taken_apart(value):
            items = [take(item, (*path, index)) for index, item in enumerate(value)]
            return {"list" if isinstance(value, list) else "tuple": items}
        return {"value": flat.add(path, encode_value(value, dotted(path)))}

    return flat, take(nested, path)


def unflatten(layout: Any, found: Mapping[str, Any]) -> Any:
    """Put together what `flatten` took apart, from its layout and what stands under each flat name now."""
    match layout:
        case {"tensor": str(name)} | {"value": str(name)}:
            return found[name]
        case {"mapping": list(pairs)}:
            return {decode_value(key): unflatten(item, found) for key, item in pairs}
        case {"list": list(items)}:
            return [unflatten(item, found) for item in items]
        case {"tuple": list(items)}:
            return tuple(unflatten(item, found) for item in items)
    raise CheckpointError(
        "the layout of an object is not readable",
        where=str(layout)[:120],
        why="it was written by a newer version, or it is damaged",
        fix="verify the checkpoint: shardwise ckpt verify PATH",
    )


def put_together(parts: Mapping[KeyPath, Any]) -> Any:
    """A nested value from its leaves by path, for checkpoints without a layout; numbers are list indices."""
    if set(parts) == {()}:
        return parts[()]
    children: dict[str | int, dict[KeyPath, Any]] = {}
    for path, value in parts.items():
        if not path:
            raise CheckpointError("a stored name is both a value and a folder of values", why="names must be unique")
        children.setdefault(path[0], {})[path[1:]] = value
    made = {key: put_together(below) for key, below in children.items()}
    if all(isinstance(key, int) for key in made):
        return [made[key] for key in sorted(made)]
    return made


def _has_tensor(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)


def _is_taken_apart(value: Mapping[Any, Any] | Sequence[Any]) -> bool:
    """Whether its items get names of their own: as in DCP, but keys other than strings keep their types."""
    if isinstance(value, Mapping):
        return (bool(value) and all(type(key) is str for key in value)) or _has_tensor(value)
    return (isinstance(value, list) and any(isinstance(item, Mapping) for item in value)) or _has_tensor(value)


def encoded_random_state() -> dict[str, torch.Tensor]:
    """Copies of the states of all generators in use, as bytes."""
    states = random_state().items()
    return {name: state if isinstance(state, torch.Tensor) else _as_bytes(state) for name, state in states}


def set_encoded_random_state(states: Mapping[str, torch.Tensor]) -> None:
    """Put states back, as far as this process has the generators."""
    for name, state in states.items():
        try:
            set_random_state({name: _from_bytes(state) if name in ("python", "numpy") else state})
        except (ValueError, TypeError, RuntimeError, KeyError) as error:
            raise CheckpointError(
                f"the state of {name}'s random numbers cannot be set",
                where=f"rng.{name}",
                why=str(error),
                fix="load without it: Checkpointer(..., rng=False)",
            ) from error


def seed_from_state(states: Mapping[str, torch.Tensor], rank: int) -> None:
    """Seed the generators of a rank that no state was saved for: from another rank's, the same whenever it resumes."""
    generator = torch.Generator()
    generator.set_state(states["torch"])
    seed_everything(int(torch.randint(0, 2**62, (), generator=generator)) ^ (rank * 0x9E3779B97F4A7C15 % 2**62))


def _as_bytes(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(encode_value(value)).encode()), dtype=torch.uint8)


def _from_bytes(state: torch.Tensor) -> Any:
    return decode_value(json.loads(bytes(state.tolist()).decode()))
