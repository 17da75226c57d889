"""Whether a value is certainly true or certainly false."""

import types
from typing import Any

import torch
from torch import nn

from shardwise.planning.source.containers import dict_items, list_items
from shardwise.planning.source.values import Known, Mapping, Sequence, Value


def truth(value: Value) -> bool | None:
    """The outcome of `if value:`, or None where it depends on the run."""
    if value.open or not value.atoms:
        return None
    answers = {_truth_of(atom) for atom in value.atoms}
    return answers.pop() if len(answers) == 1 else None


def _truth_of(atom: Any) -> bool | None:
    if isinstance(atom, Sequence | Mapping):
        return bool(atom.items)
    if not isinstance(atom, Known):
        return None if type(atom).__name__ in ("Many", "Parameters") else True
    thing = atom.object
    if thing is None or isinstance(thing, bool | int | float | str | bytes):
        return bool(thing)
    if isinstance(thing, torch.Tensor):
        return None
    items = list_items(thing)
    if items is None and (by_key := dict_items(thing)) is not None:
        items = list(by_key.values())
    if items is not None:
        return bool(items)
    # Functions, classes and ordinary modules have no truth of their own, so they are true.
    if isinstance(thing, type | types.FunctionType):
        return True
    return True if isinstance(thing, nn.Module) and not hasattr(type(thing), "__len__") else None
