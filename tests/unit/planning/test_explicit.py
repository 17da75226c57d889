"""Groups named by the user, and the messages when the names do not fit."""

import pytest
from torch import nn

from shardwise.config.schema import GroupOverride, MeshConfig, ShardConfig
from shardwise.errors import PlanError
from shardwise.planning.planner import plan
from tests.toy_models import Block, Stack
from tests.unit.planning.test_groups import modules_of

TWO_RANKS = MeshConfig(shard=2, device="cpu")


def make() -> Stack:
    return Stack(nn.ModuleList([Block(), Block(), Block()]))


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"block_classes": ("Block",)}, ["blocks.0", "blocks.1", "blocks.2"]),
        ({"block_patterns": ("blocks.*",)}, ["blocks.0", "blocks.1", "blocks.2"]),
        ({"block_patterns": ("blocks.1", "embed")}, ["embed", "blocks.1"]),
        ({"block_patterns": ("**.up",)}, ["blocks.0.up", "blocks.1.up", "blocks.2.up"]),
        ({"min_group_params": 500}, ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]),
        ({"wrap_if": lambda module: isinstance(module, nn.Embedding)}, ["embed"]),
        ({"wrap_if": lambda name, module: name.endswith("2")}, ["blocks.2"]),
        ({"group_by": "children"}, ["embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]),
        ({"group_by": "root"}, []),
    ],
    ids=[
        "class",
        "pattern",
        "patterns",
        "spanning",
        "size",
        "predicate",
        "named-predicate",
        "children",
        "root",
    ],
)
def test_the_user_names_groups(settings, names):
    assert modules_of(plan(make(), ShardConfig(**settings), mesh=TWO_RANKS)) == [*names, "(root)"]


def test_attributes_mark_groups():
    model = make()
    model.blocks[1]._fsdp_wrap = True
    result = plan(model, ShardConfig(group_by="attribute"), mesh=TWO_RANKS)
    assert modules_of(result) == ["blocks.1", "(root)"]


def test_nested_groups_come_children_first():
    result = plan(make(), ShardConfig(block_patterns=("blocks.0", "blocks.0.up")), mesh=TWO_RANKS)
    assert modules_of(result) == ["blocks.0.up", "blocks.0", "(root)"]
    inner, outer = result.groups[:2]
    assert {p.fqn for p in inner.parameters} == {"blocks.0.up.weight", "blocks.0.up.bias"}
    assert not {p.fqn for p in inner.parameters} & {p.fqn for p in outer.parameters}


@pytest.mark.parametrize("settings", [{"block_patterns": ("blocks",)}, {"block_classes": ("ModuleList",)}])
def test_a_container_named_as_a_group_is_refused(settings):
    with pytest.raises(PlanError, match="blocks is a ModuleList, which has no forward") as error:
        plan(make(), ShardConfig(**settings), mesh=TWO_RANKS)
    assert "blocks.*" in error.value.fix


def test_an_unknown_pattern_is_refused_with_the_nearest_names():
    with pytest.raises(PlanError, match=r"'blokcs\.0', which matches nothing") as error:
        plan(make(), ShardConfig(block_patterns=("blokcs.0",)), mesh=TWO_RANKS)
    assert "blocks.0" in error.value.fix


def test_an_unknown_class_is_refused_with_the_nearest_names():
    with pytest.raises(PlanError, match="'Blocks', which matches nothing") as error:
        plan(make(), ShardConfig(block_classes=("Blocks",)), mesh=TWO_RANKS)
    assert "'Block'" in error.value.fix


def test_unknown_names_in_ignored_overrides_and_entry_points_are_refused():
    for settings, where in [
        ({"ignored": ("nothing.*",)}, "ignored"),
        ({"overrides": (GroupOverride(pattern="nothing", param_dtype="float32"),)}, "overrides"),
        ({"entry_points": (":generate",)}, "entry point"),
    ]:
        with pytest.raises(PlanError, match=where):
            plan(make(), ShardConfig(**settings), mesh=TWO_RANKS)


def test_a_tie_across_two_named_groups_is_refused_with_both_paths():
    model = make()
    model.head.weight = model.embed.weight
    with pytest.raises(PlanError, match=r"'embed.weight' and 'head.weight' are one tensor") as error:
        plan(model, ShardConfig(block_patterns=("embed", "head")), mesh=TWO_RANKS)
    assert "embed" in error.value.where
    assert "head" in error.value.where


def test_ignored_parameters_and_modules_leave_their_groups():
    result = plan(make(), ShardConfig(ignored=("blocks.0.norm", "head.weight")), mesh=TWO_RANKS)
    assert {p.fqn for p in result.ignored} == {"blocks.0.norm.weight", "blocks.0.norm.bias", "head.weight"}
    grouped = {p.fqn for group in result.groups for p in group.parameters}
    assert not grouped & {p.fqn for p in result.ignored}
