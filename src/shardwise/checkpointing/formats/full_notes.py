"""What a full file says that nested dictionaries alone do not: a text in the dictionary. No torch.

Dictionaries are taken apart when a file is read, so a value that is one (or holds one) would come back in pieces; and
`torch.load(weights_only=True)` reads no other classes than plain ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.checkpointing.contents import Contents
from shardwise.checkpointing.sharded.values import decode_value
from shardwise.errors import CheckpointError

NOTES = "__shardwise__"
"""The key of the text (JSON)."""
_HIDDEN = ("__layout__", "__kinds__")


def make_notes(
    encoded: Mapping[str, Any],
    structure: Mapping[str, tuple[str | int, ...]],
    *,
    step: int | None = None,
    world_size: int | None = None,
) -> str:
    """The text, for values as `encode_value` gives them."""
    values = {name: value for name, value in encoded.items() if _is_structured(value) or _is_hidden(name)}
    paths = {name: structure[name] for name in values if name in structure}
    return json.dumps({"values": values, "structure": paths, "step": step, "world_size": world_size})


def plain_values(encoded: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the dictionary itself can hold, for those who read it with `torch.load`."""
    decoded = {name: decode_value(value) for name, value in encoded.items() if not _is_hidden(name)}
    return {name: value for name, value in decoded.items() if _is_plain(value)}


def with_notes(contents: Contents) -> Contents:
    """Put the notes back among the values, where the sharded format has them; files of others are as they are.

    Raises:
        CheckpointError: The notes are damaged.
    """
    if NOTES not in contents.values:
        return contents
    try:
        notes = json.loads(contents.values[NOTES])
        values = {str(name): decode_value(note) for name, note in notes["values"].items()}
        structure = {str(name): tuple(path) for name, path in notes["structure"].items()}
        step, world_size = notes["step"], notes["world_size"]
        if not all(number is None or type(number) is int for number in (step, world_size)):
            raise TypeError("a step or a number of ranks that is none")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            "the notes of the file cannot be read",
            where=f"{contents.path}: {NOTES}",
            why=f"{type(error).__name__}: {error}",
            fix="copy the file again, or load an older one",
        ) from None
    inside = tuple(f"{name}." for name in values)
    kept = {name: value for name, value in contents.values.items() if name != NOTES and not name.startswith(inside)}
    paths = {name: path for name, path in contents.structure.items() if name in kept or name in contents.tensors}
    return replace(
        contents,
        values={**kept, **values},
        structure={**paths, **structure},
        step=step,
        world_size=world_size,
        details={**contents.details, "has_our_names": True},
    )


def _is_hidden(name: str) -> bool:
    return name.rpartition(".")[2] in _HIDDEN


def _is_structured(encoded: Any) -> bool:
    return isinstance(encoded, dict) or (isinstance(encoded, list) and any(map(_is_structured, encoded)))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    if type(value) in (list, tuple, set):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, bytes)
