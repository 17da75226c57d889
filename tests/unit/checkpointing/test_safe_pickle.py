"""The pickle machine: plain data as Python's own gives it, and nothing else."""

from __future__ import annotations

import collections
import contextlib
import pickle
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpointing.pickles.machine import Record, Symbol, load_pickle, makers, symbols
from shardwise.errors import CheckpointError

keys = st.one_of(st.text(max_size=8), st.integers(-(2**70), 2**70), st.booleans(), st.none(), st.binary(max_size=8))
leaves = st.one_of(keys, st.floats(allow_nan=False), st.binary(max_size=300), st.text(max_size=300))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(keys, inner, max_size=5),
        st.sets(keys, max_size=5),
        st.frozensets(keys, max_size=5),
    ),
    max_leaves=25,
)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@given(value=values)
def test_plain_values_are_what_python_reads(value: object, protocol: int):
    data = pickle.dumps(value, protocol=protocol)
    allowed = makers({"_codecs.encode": lambda text, _: text.encode("latin1"), "__builtin__.bytes": bytes,
                      "__builtin__.set": set, "__builtin__.frozenset": frozenset, "builtins.set": set,
                      "builtins.frozenset": frozenset})  # fmt: skip
    assert load_pickle(data, allowed=allowed) == pickle.loads(data)


@given(data=st.binary(max_size=200))
def test_noise_is_refused_in_our_own_words(data: bytes):
    with contextlib.suppress(CheckpointError):
        load_pickle(data, allowed={})


@given(value=values, cut=st.integers(0, 400))
def test_a_pickle_cut_short_is_refused(value: object, cut: int):
    data = pickle.dumps(value)
    with pytest.raises(CheckpointError):
        load_pickle(data[: min(cut, len(data) - 1)], allowed={})


def test_shared_values_stay_shared_and_cycles_are_kept():
    inner: list[object] = []
    inner.append(inner)
    found = load_pickle(pickle.dumps([inner, inner]), allowed={})
    assert found[0] is found[1]
    assert found[0][0] is found[0]


class Point:
    """Stands for any class of a checkpoint."""

    def __init__(self, x: int) -> None:
        self.x = x


def test_objects_of_known_classes_are_records_and_never_made():
    name = f"{Point.__module__}.Point"
    found = load_pickle(pickle.dumps(Point(3)), allowed={}, records=(name,))
    assert isinstance(found, Record)
    assert (found.name, found.fields) == (name, {"x": 3})


def test_subclasses_of_list_and_dict_are_records_too():
    data = pickle.dumps([collections.OrderedDict(a=1), collections.deque([1, 2])])
    found = load_pickle(data, allowed={}, records=("collections.",))
    assert [record.name for record in found] == ["collections.OrderedDict", "collections.deque"]


def test_names_that_may_be_mentioned_may_not_be_called():
    mentioned = load_pickle(b"cbuiltins\nlist\n.", allowed=symbols("builtins.list"))
    assert isinstance(mentioned, Symbol)
    with pytest.raises(CheckpointError, match="may only be named"):
        load_pickle(b"cbuiltins\nlist\n(tR.", allowed=symbols("builtins.list"))


def test_an_unknown_name_is_in_the_message_and_is_not_imported():
    assert "antigravity" not in sys.modules
    with pytest.raises(CheckpointError, match=r"'antigravity\.fly'"):
        load_pickle(b"cantigravity\nfly\n.", allowed={})
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "data",
    [
        b"ios\nsystem\n(S'true'\nR.",  # INST
        b"(S'true'\nios\nsystem\n.",  # INST in its own order
        b"(cos\nsystem\nS'true'\no.",  # OBJ
        b"\x82\x01.",  # EXT1: a registry of classes
        b"P1\n.",  # PERSID
        b"\x97.",  # NEXT_BUFFER
        b"\x80\x04\x8b\xff\xff\xff\x7f.",  # LONG4: an integer of 2 GiB
        b"\x80\x05\x96" + b"\xff" * 7 + b"\x0f.",  # BYTEARRAY8: memory of any size
    ],
)
def test_instructions_that_checkpoints_do_not_need_are_refused(data: bytes):
    with pytest.raises(CheckpointError):
        load_pickle(data, allowed={})


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x8f" * 300_000 + b".", "too many objects"),  # a set is 216 bytes
        (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x0f.", "inside a value"),  # 2**60 bytes
    ],
)
def test_a_small_pickle_cannot_ask_for_much_memory(data: bytes, why: str):
    with pytest.raises(CheckpointError) as error:
        load_pickle(data, allowed={})
    assert why in error.value.why


def test_a_high_place_in_the_memo_costs_nothing():
    """Python's own unpickler allocates room for all places below: 64 GiB here."""
    assert load_pickle(b"\x80\x04Nr\xff\xff\xff\xff.", allowed={}) is None


def test_keys_whose_hash_takes_for_ever_are_refused():
    """Each level doubles the time of Python's hash: fifty levels take days."""
    data = b"\x80\x04})" + b"2\x86" * 50 + b"Ns."
    with pytest.raises(CheckpointError, match="cannot be read") as error:
        load_pickle(data, allowed={})
    assert "key" in error.value.why


def test_a_pickle_larger_than_allowed_is_not_read():
    with pytest.raises(CheckpointError, match="more than 10 bytes"):
        load_pickle(pickle.dumps("x" * 20), allowed={}, max_bytes=10)
