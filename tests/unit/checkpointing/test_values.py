"""Plain values come back from JSON exactly as they were, and nothing else is let in."""

from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpointing.formats.values import decode_value, encode_value
from shardwise.errors import CheckpointError


def there_and_back(value: Any) -> Any:
    return decode_value(json.loads(json.dumps(encode_value(value), allow_nan=False)))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
KEYS = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
PLAIN = st.recursive(
    SCALARS,
    lambda below: (
        st.lists(below)
        | st.lists(below).map(tuple)
        | st.dictionaries(KEYS, below)
        | st.dictionaries(st.sampled_from(["$", "of", "a"]), below)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_any_plain_value_survives(value: Any):
    found = there_and_back(value)
    assert repr(found) == repr(value)  # tells 1 from 1.0 from True, and NaN from NaN it does not


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        frozenset({"a"}),
        torch.float8_e4m3fn,
        torch.device("cpu"),
        torch.Size([2, 3]),
        -0.0,
        float("inf"),
        2**200,
        {"$": "tuple", "of": [1]},
        Counter({3: 2, "a": 1}),
        Counter(),
        OrderedDict(b=1, a=[Counter(x=1)]),
        defaultdict(int, {"a": 1, (1, 2): 2}),
        defaultdict(None, a=1),
        defaultdict(list, a=[deque()]),
        deque([1, "a"], maxlen=3),
        deque([{"b": 1}]),
        Path("runs/7"),
    ],
    ids=repr,
)
def test_kinds_survive(value: Any):
    found = there_and_back(value)
    assert (type(found), found) == (type(value), value)
    assert repr(found) == repr(value)  # also of what is inside, with maxlen and default factory
    assert math.copysign(1, found) == math.copysign(1, value) if isinstance(value, float) else True


@pytest.mark.parametrize("dtype", ["float32", ">i8", "uint8", "bool", "<U3", "complex64"])
def test_arrays_survive(dtype: str):
    array = numpy.array([[1, 0], [0, 1]]).astype(dtype)
    found = there_and_back({"array": array, "scalar": array[0, 0]})
    assert found["array"].dtype == array.dtype
    assert (found["array"] == array).all()
    assert found["array"].flags.writeable
    assert found["scalar"] == array[0, 0]


def test_subclasses_become_what_they_are_made_of():
    class Count(Counter[str]):
        """A type of the program's own."""

    plain = [there_and_back(value) for value in (Count(a=1), defaultdict(lambda: 0, a=1), namedtuple("P", "a")(1))]
    assert repr(plain) == "[{'a': 1}, {'a': 1}, (1,)]"
    assert there_and_back(torch.torch_version.TorchVersion("2.13")) == "2.13"


class Colour(enum.Enum):
    RED = 1


REFUSED = {
    "function": print,
    "object": object(),
    "enum": Colour.RED,
    "tensor": torch.ones(1),
    "deep inside": [{"deep": lambda: 0}],
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_other_objects_are_refused_by_name(value: Any):
    with pytest.raises(CheckpointError, match="cannot be stored") as caught:
        encode_value({"outer": value}, "schedule")
    assert caught.value.where.startswith("schedule.outer")


@pytest.mark.parametrize(
    "encoded",
    [
        {"$": "code", "of": "1+1"},
        {"$": ["tuple"], "of": []},
        {"$": "float", "of": "1"},
        {"$": "torch.dtype", "of": "load"},
        {"$": "mapping", "of": [[[1], 2]]},
        {"$": "numpy.array", "dtype": "|O", "shape": [1], "of": "AAAAAAAAAAA="},
        {"$": "numpy.array", "dtype": "<f4", "shape": [9], "of": "AAAA"},
        {"$": "bytes"},
        {"$": "mapping", "of": [], "type": "eval"},
        {"$": "mapping", "of": [], "type": "defaultdict", "factory": "exec"},
        {"$": "mapping", "of": [], "type": ["Counter"]},
        {"$": "deque", "of": [1]},
        {"$": "path", "of": 1},
    ],
    ids=str,
)
def test_damaged_encodings_are_refused(encoded: Any):
    with pytest.raises(CheckpointError, match="not readable"):
        decode_value(encoded)


def test_mappings_that_earlier_versions_stored_are_dictionaries():
    assert decode_value({"$": "mapping", "of": [[3, 2]]}) == {3: 2}
    assert encode_value({3: 2}) == {"$": "mapping", "of": [[3, 2]]}
    assert encode_value({"a": 1}) == {"a": 1}
