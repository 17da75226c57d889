"""Casting inputs: every container keeps its type and its other contents, and the input stays as it was."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Iterator, MutableMapping
from dataclasses import InitVar, dataclass, field
from enum import Enum
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from shardwise.models.nested_tensors import cast_inputs

HALF = torch.bfloat16
Pair = namedtuple("Pair", ["first", "second"])


class Typed(NamedTuple):
    x: torch.Tensor
    name: str = "typed"


@dataclass
class Ordinary:
    x: torch.Tensor
    label: str = "kept"


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    twice: torch.Tensor = field(init=False)
    offset: InitVar[float] = 1.0

    def __post_init__(self, offset: float) -> None:
        object.__setattr__(self, "twice", 2 * self.x + offset)


@dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor
    ids: torch.Tensor


class Plain:
    made = 0

    def __init__(self, x: torch.Tensor) -> None:
        Plain.made += 1
        self.x = x
        self.nested = {"deep": [x, "text"]}


class BySlots:
    __slots__ = ("unset", "x")

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Locked:
    """Cannot be pickled, hence not copied by `copy.copy`."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.lock = threading.Lock()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot pickle a lock")


class Wrapping(MutableMapping):
    """A mapping of its own; a shallow copy shares what it wraps."""

    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Listed(list):
    extra: torch.Tensor


class Colour(Enum):
    RED = 1


def numbers() -> torch.Tensor:
    return torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("batch", "read"),
    [
        (numbers(), lambda b: b),
        ({"x": numbers(), 3: "text"}, lambda b: b["x"]),
        (OrderedDict(x=numbers()), lambda b: b["x"]),
        (defaultdict(list, x=numbers()), lambda b: b["x"]),
        (UserDict(x=numbers()), lambda b: b["x"]),
        (Wrapping(x=numbers()), lambda b: b["x"]),
        (MappingProxyType({"x": numbers()}), lambda b: b["x"]),
        ([numbers(), None], lambda b: b[0]),
        (deque([numbers()], maxlen=3), lambda b: b[0]),
        (UserList([numbers()]), lambda b: b[0]),
        ((1, numbers()), lambda b: b[1]),
        (Pair(numbers(), 2), lambda b: b.first),
        (Typed(numbers()), lambda b: b.x),
        (torch.max(torch.eye(2), dim=0), lambda b: b.values),
        ({"s": {numbers()}}, lambda b: next(iter(b["s"]))),
        (Ordinary(numbers()), lambda b: b.x),
        (Frozen(numbers()), lambda b: b.twice),
        (Slotted(numbers(), torch.arange(2)), lambda b: b.x),
        (SimpleNamespace(x=numbers(), y=1), lambda b: b.x),
        (Plain(numbers()), lambda b: b.nested["deep"][0]),
        (BySlots(numbers()), lambda b: b.x),
        (pack_sequence([numbers(), numbers()[:1]]), lambda b: b.data),
        ([{"a": (Frozen(numbers()),)}], lambda b: b[0]["a"][0].x),
    ],
    ids=lambda value: type(value).__name__,
)
def test_type_is_kept_and_the_input_is_not_changed(batch: Any, read: Any):
    before = read(batch).clone()
    made = Plain.made
    result = cast_inputs(batch, HALF)
    assert type(result) is type(batch)
    assert read(result).dtype == HALF
    torch.testing.assert_close(read(result).float(), before)
    assert read(batch).dtype == torch.float32
    assert Plain.made == made, "constructors are not run"


def test_only_floating_tensors_are_cast_and_all_else_is_shared():
    tokenizer, module, ids = object(), nn.Linear(1, 1), torch.arange(3)
    stateful = Plain("no tensor")  # pyrefly: ignore
    batch = {
        "ids": ids,
        "mask": torch.ones(2, dtype=torch.bool),
        "phase": torch.ones(2, dtype=torch.complex64),
        "half": torch.ones(2, dtype=torch.float16),
        "tokenizer": tokenizer,
        "module": module,
        "colour": Colour.RED,
        "stateful": stateful,
        "kind": Plain,
    }
    result = cast_inputs(batch, HALF)
    dtypes = [result[name].dtype for name in ("ids", "mask", "phase", "half")]
    assert dtypes == [torch.int64, torch.bool, torch.complex64, HALF]
    for name in ("ids", "tokenizer", "module", "colour", "stateful", "kind"):
        assert result[name] is batch[name]
    assert module.weight.dtype == torch.float32


def test_what_the_copies_hold_besides_tensors_is_kept():
    assert cast_inputs(defaultdict(list, x=numbers()), HALF)["new"] == []
    assert cast_inputs(deque([numbers()], maxlen=3), HALF).maxlen == 3
    assert cast_inputs(Ordinary(numbers()), HALF).label == "kept"
    listed = Listed([numbers()])
    listed.extra = numbers()
    assert cast_inputs(listed, HALF).extra.dtype == HALF
    assert listed.extra.dtype == torch.float32
    assert not hasattr(cast_inputs(BySlots(numbers()), HALF), "unset")
    frozen = cast_inputs(Frozen(numbers(), 5.0), HALF)
    torch.testing.assert_close(frozen.twice, (2 * numbers() + 5).to(HALF))


def test_cycles_and_shared_parts_survive():
    shared = numbers()
    node = SimpleNamespace(x=shared, again=shared)
    node.itself, node.parent = node, {"child": node, "row": [shared]}
    result = cast_inputs(node, HALF)
    assert result is not node
    assert result.itself is result
    assert result.parent["child"] is result
    assert result.x is result.again is result.parent["row"][0]
    assert node.itself is node
    assert node.x is shared

    loop: list[Any] = [numbers()]
    loop.append((loop, numbers()))
    cast = cast_inputs(loop, HALF)
    assert cast[1][0] is cast
    assert cast[1][1].dtype == HALF


def test_object_that_cannot_be_pickled_is_still_copied():
    batch = Locked(numbers())
    result = cast_inputs(batch, HALF)
    assert (result.x.dtype, batch.x.dtype) == (HALF, torch.float32)
    assert result.lock is batch.lock


def test_gradients_flow_through():
    x = torch.ones(2, requires_grad=True)
    cast_inputs({"x": x}, HALF)["x"].sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(2))


def test_device_moves_every_tensor_and_nothing_asked_changes_nothing():
    batch = {"ids": torch.arange(2), "x": numbers()}
    moved = cast_inputs(batch, device="meta")
    assert {tensor.device.type for tensor in moved.values()} == {"meta"}
    assert [moved["ids"].dtype, moved["x"].dtype] == [torch.int64, torch.float32]
    assert cast_inputs(batch) is batch
    both = cast_inputs(pack_sequence([numbers()]), HALF, "meta")
    assert (both.data.dtype, both.data.device.type) == (HALF, "meta")


def test_hugging_face_containers():
    transformers = pytest.importorskip("transformers")
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=numbers(), hidden_states=(numbers(),))
    result = cast_inputs(output, HALF)
    assert type(result) is type(output)
    assert result.last_hidden_state.dtype == result["hidden_states"][0].dtype == HALF
    assert result.last_hidden_state is result["last_hidden_state"]
    assert output.last_hidden_state.dtype == torch.float32
    encoding = transformers.BatchEncoding({"input_ids": torch.arange(2), "pixel_values": numbers()})
    cast = cast_inputs(encoding, HALF)
    assert type(cast) is type(encoding)
    assert cast["pixel_values"].dtype == cast.pixel_values.dtype == HALF
    assert cast["input_ids"] is encoding["input_ids"]
    assert encoding["pixel_values"].dtype == torch.float32
    assert copy.copy(encoding)["pixel_values"] is encoding["pixel_values"]
