"""The comparison itself: it sees what was added, removed and changed, and says where."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import pytest

from tests.contract.annotations import type_text, value_text
from tests.contract.drift import ADVICE, check, drift, read_record, write_record
from tests.contract.python_names import Describer
from tests.contract.shapes import shape_of

Choice = Literal["a", "b"]


def test_each_kind_of_drift_is_a_line_with_its_place():
    before = {"train": {"--set": "x", "--nproc": 2}, "plan": {}}
    after = {"train": {"--set": "y", "--ranks": 2}, "plan": {}}
    added, changed, removed = sorted(drift(before, after), key=lambda line: line.split()[0])
    assert added.split() == ["added", "train", ">", "--ranks:", "2"]
    assert removed.split() == ["removed", "train", ">", "--nproc:", "2"]
    assert "train > --set" in changed
    assert "from x" in changed


def test_equal_contracts_have_no_drift(tmp_path: Path):
    contract = {"a": {"b": [1, None, "ü"]}}
    write_record(contract, tmp_path / "contract.json")
    assert not list(drift(read_record(tmp_path / "contract.json"), contract))


def test_a_piece_that_has_changed_fails_with_what_to_do():
    recorded = read_record()["settings"]
    check("settings", recorded)
    with pytest.raises(AssertionError, match="in 1 places") as caught:
        check("settings", {**recorded, "new file": {}})
    assert ADVICE in str(caught.value)


def test_an_additional_field_of_a_class_is_seen():
    fields = [("size", int, 3), ("choice", Choice | None, None)]
    shorter = dataclasses.make_dataclass("Sample", fields, frozen=True)
    longer = dataclasses.make_dataclass("Sample", [*fields, ("more", "Progress", 1)], frozen=True)
    shorter.__module__ = longer.__module__ = "shardwise.progress"  # only what is ours is described
    before, after = Describer().describe(shorter), Describer().describe(longer)
    assert before["constructor"] == "(size: int = 3, choice: Literal['a', 'b'] | None = None)"
    assert [line for line in drift(before, after) if "attributes" in line] == ["added    attributes > more: Progress"]


def test_types_read_the_same_however_they_are_written():
    assert type_text("Choice | Path", __name__) == type_text(Choice | Path, __name__) == "Literal['a', 'b'] | Path"
    assert type_text("Unheard[int] | elsewhere.Name", __name__) == "Unheard[int] | Name"


def test_default_values_have_no_addresses():
    assert value_text(object()) == "object()"
    assert value_text(test_default_values_have_no_addresses) == "test_default_values_have_no_addresses"
    assert value_text((1, "a")) == "(1, 'a')"


def test_fields_of_json_are_merged_over_objects():
    values = [{"a": 1, "m": {"x": 1}, "l": [{"b": None}, {"b": "t", "c": 1.5}]}, {"a": None, "m": {"y": 2}, "l": []}]
    assert shape_of(values, maps=("m",)) == {
        "a": "integer or null",
        "m": "object",
        "m.*": "integer",
        "l": "list",
        "l[]": "object",
        "l[].b": "null or string",
        "l[].c?": "number",
    }
