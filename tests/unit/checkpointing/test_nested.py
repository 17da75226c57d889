"""A state dict taken apart and put together is the same, under the names that torch gives."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from shardwise.checkpointing.formats.values import decode_value, nest
from shardwise.checkpointing.state import flatten, unflatten
from shardwise.errors import CheckpointError

ONE, TWO = torch.ones(2), torch.zeros(3)


def there_and_back(state: Any) -> Any:
    flat, layout = flatten(state, ("data",))

    return unflatten(layout, {**flat.tensors, **{name: decode_value(value) for name, value in flat.values.items()}})


STATES: dict[str, Any] = {
    "flat": {"a": 1, "b": ONE},
    "deep": {"a": {"b": {"c": ONE, "d": [1, 2]}}},
    "lists": {"a": [ONE, {"b": TWO}], "c": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
    "tuples": {"a": (ONE, 2), "b": (1, (2, 3))},
    "numbers as keys": {"state": {0: {"x": ONE}, 1: {"x": TWO}}, "milestones": {30: 1}},
    "empty": {"a": {}, "b": [], "c": (), "d": None},
    "dots": {"a.b": 1, "a": {"c": 2}},
    "types": OrderedDict(a=Counter({1: 2}), b=defaultdict(list, c=[ONE]), d=deque([1], 2)),
    "nothing": {},
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_the_same_comes_back(state: Any):
    assert repr(there_and_back(state)) == repr(state)


@pytest.mark.parametrize("kind", ["flat", "deep", "lists", "dots"])
def test_names_are_torchs(kind: str):
    flat, _ = flatten(STATES[kind], ("data",))
    theirs, paths = flatten_state_dict({"data": STATES[kind]})
    assert {*flat.tensors, *flat.values} == set(theirs)
    assert flat.paths == paths


def test_values_are_snapshots():
    state = {"list": [1]}
    flat, _ = flatten(state, ("data",))
    state["list"].append(2)
    assert flat.values["data.list"] == [1]


def test_two_things_of_one_name_are_refused():
    with pytest.raises(CheckpointError, match="same name"):
        flatten({"a.b": 1, "a": {"b": 2}}, ("data",))


def test_from_paths_alone():
    parts = {("a", 0, "x"): 1, ("a", 1, "x"): 2, ("b",): 3}
    assert nest(parts) == {"a": [{"x": 1}, {"x": 2}], "b": 3}
    assert nest({(): 5}) == 5
    with pytest.raises(CheckpointError, match="both a value and a prefix"):
        nest({(): 5, ("a",): 6})


@pytest.mark.parametrize(
    "layout", [{}, {"tensor": 1}, [], None, {"call": "os.system"}, {"mapping": [], "type": "eval"}], ids=str
)
def test_damaged_layouts_are_refused(layout: Any):
    with pytest.raises(CheckpointError, match="is not readable"):
        unflatten(layout, {})
