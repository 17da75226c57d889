"""Names: what wrappers add is taken away, stored names find their place, and what does not is explained."""

import re

import pytest

from shardwise.checkpointing.names import (
    KeyReport,
    Mismatch,
    describe_problems,
    match_names,
    rename_with,
    suggest,
)
from shardwise.sharding.inventory import canonical_name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.0.weight", "layers.0.weight"),
        ("_orig_mod.layers.0.weight", "layers.0.weight"),
        ("layers.0._checkpoint_wrapped_module.attention.weight", "layers.0.attention.weight"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.weight", "layers.0.weight"),
        ("_forward_module._orig_mod.weight", "weight"),
        ("layers._orig_mod", "layers"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),  # a name that only contains a wrapper's
        ("module.weight", "module.weight"),  # may be the user's own
    ],
)
def test_canonical_names(name: str, expected: str):
    assert canonical_name(name) == expected


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod.", "_forward_module."]
)
def test_prefixes_of_wrappers_on_the_stored_side_do_not_matter(prefix: str):
    names = ["a.weight", "a.bias", "b.weight"]
    found, left, _ = match_names(names, [prefix + name for name in names])
    assert found == {name: prefix + name for name in names}
    assert left == []


def test_a_prefix_on_the_models_side_does_not_matter():
    assert match_names(["module.a", "module.b"], ["a", "b"])[0] == {"module.a": "a", "module.b": "b"}


def test_a_module_that_is_really_called_module_keeps_its_name():
    names = ["module.weight", "head.weight"]
    assert match_names(names, names)[0] == {name: name for name in names}
    inner = ["encoder.module.weight"]
    assert match_names(inner, inner)[0] == {"encoder.module.weight": "encoder.module.weight"}


def test_the_prefix_under_which_most_names_match_is_taken():
    stored = ["model.a", "model.b", "optim.state.a.exp_avg", "a"]
    found, left, prefix = match_names(["a", "b"], stored, prefixes=("", "model."))
    assert found == {"a": "model.a", "b": "model.b"}
    assert prefix == "model."
    assert left == ["optim.state.a.exp_avg", "a"]


def test_names_that_match_as_they_are_win_over_a_prefix():
    names = ["model.a", "a"]
    assert match_names(names, names, prefixes=("", "model."))[0] == {"model.a": "model.a", "a": "a"}


@pytest.mark.parametrize(
    ("rename", "name", "expected"),
    [
        ({"old": "new"}, "old.weight", "new.weight"),
        ({"old": "new"}, "old", "new"),
        ({"old": "new"}, "older.weight", "older.weight"),
        ({"old.": "new."}, "old.weight", "new.weight"),
        ({"old": ""}, "old.weight", "weight"),
        ({"old": None}, "old.weight", None),
        ({"old.weight": "w"}, "old.weight", "w"),
        ({"a.b": "x", "a": "y"}, "a.b.c", "x.c"),
        ({re.compile(r"^h\.(\d+)\."): r"layers.\1."}, "h.12.weight", "layers.12.weight"),
        ({re.compile("rotary"): None}, "layers.0.rotary.inv_freq", None),
        ({re.compile("a"): "b", re.compile("b"): "c"}, "a", "c"),
        (lambda name: name.upper(), "a", "A"),
    ],
)
def test_rename(rename: object, name: str, expected: str | None):
    assert rename_with(rename)(name) == expected


def test_suggestions_prefer_the_same_last_part():
    assert suggest("blocks.0.up.weight", ["block.0.up.weight", "blocks.0.up.weighs"]) == "block.0.up.weight"
    assert suggest("blocks.0.up.weight", ["something.else"]) == ""


def test_problems_are_listed_and_the_rest_counted():
    lines = describe_problems(
        [f"a.{index}" for index in range(30)], ["b"], [Mismatch("c", "float32 [1]", "float32 [2]")]
    )
    assert lines[0] == "missing     a.0"
    assert lines[20] == "... and 10 more"
    assert lines[21] == "unexpected  b"
    assert lines[22] == "mis-shaped  c: stored as float32 [1], the model's is float32 [2]"


def test_a_report_prints_what_matters():
    report = KeyReport(loaded=("a", "b"), missing=("c",), tied={"d": "a"})
    assert not report.is_exact
    assert str(report) == "2 loaded, 1 tied, 1 missing\nmissing     c"
    assert KeyReport(loaded=("a",), ignored=("x",), rebuilt=("t",)).is_exact


def test_a_report_counts_a_missing_tensor_once_although_it_was_initialised():
    wrong = Mismatch("d", "float32 [1]", "float32 [2]")
    report = KeyReport(loaded=("a",), missing=("c",), mismatched=(wrong,), rebuilt=("c", "d", "table"))
    assert str(report).splitlines()[0] == "1 loaded, 1 rebuilt, 1 missing, 1 of another shape"
