"""Experts in the plan: which modules are divided over the expert axis, how, and what is refused."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.config.schema import ExpertConfig
from shardwise.errors import PlanError
from shardwise.models.grouped_experts import GroupedExperts
from shardwise.models.moe import SHAPES, Moe

MESH = sw.MeshConfig(shard=4, expert=2, device="cpu")


def model(num_experts: int = 4) -> nn.Module:
    with torch.device("meta"):
        return Moe(replace(SHAPES["moe-debug"], num_experts=num_experts))


def test_experts_are_groups_of_their_own_over_the_other_axes():
    plan = sw.plan(model(), mesh=MESH)
    experts = [group for group in plan.groups if group.kind == "experts"]
    assert [group.name for group in experts] == [f"model.layers.{i}.block_sparse_moe.experts" for i in range(3)]
    assert all(group.shard_axes == ("shard",) for group in experts)
    assert {group.shard_axes for group in plan.groups if group.kind != "experts"} == {("shard", "expert")}
    stacked = experts[0].parameters[0]
    assert (stacked.splits, stacked.shard_dim) == ((("expert", 0, 2),), 1)  # 2 experts on 4 ranks: dim 1
    assert stacked.bytes_per_rank(4) * 8 == stacked.num_bytes
    assert plan.bytes_per_rank * 8 == pytest.approx(plan.num_bytes, rel=0.01)
    assert sw.plan(model(8), mesh=MESH).groups[0].parameters[0].shard_dim == 0
    text = str(plan)
    assert "expert parallel: model.layers.*.block_sparse_moe.experts  2 of 4 experts on each rank" in text
    assert "order: expert parallel, then fully_shard" in text
    assert sw.Plan.from_json(plan.to_json()) == plan


def test_an_axis_that_the_experts_do_not_divide_is_refused_with_sizes_that_work():
    with pytest.raises(PlanError, match="has 4 experts, which 8 ranks cannot share") as caught:
        sw.plan(model(), mesh=sw.MeshConfig(expert=8, device="cpu"))
    assert caught.value.fix == "set mesh.expert = 4; these sizes work: 1, 2, 4"
    with pytest.raises(PlanError, match="has 6 experts, which 4 ranks cannot share") as caught:
        sw.plan(model(6), mesh=sw.MeshConfig(expert=4, device="cpu"))
    assert caught.value.fix == "set mesh.expert = 3; these sizes work: 1, 2, 3, 6"


def test_a_model_without_experts_is_refused():
    with pytest.raises(PlanError, match="Linear has no experts to split") as caught:
        sw.plan(nn.Linear(4, 4), mesh=MESH)
    assert "mesh.expert = 1" in caught.value.fix


class Looped(nn.Module):
    """Experts as a list, called one by one, and their shared router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        return sum(expert(x) * (chosen == number)[:, None] for number, expert in enumerate(self.experts))


def test_a_list_of_experts_is_refused_by_name():
    with pytest.raises(PlanError) as caught:
        sw.plan(Looped(), mesh=MESH)
    assert caught.value.where == "experts"
    assert "a list of 4 Linear modules, which are called one by one" in caught.value.why
    assert "one module with stacked parameters" in caught.value.fix


class Mixed(nn.Module):
    """A layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.looped, self.experts, self.own = Looped(), GroupedExperts(4, 8, 16), OwnExperts()

    def forward(self, x: Tensor) -> Tensor:
        index, weights = x[:, :2].long(), x[:, :2]
        return self.own(self.experts(self.looped(x), index, weights), index, weights)


class OwnExperts(nn.Module):
    """Of a user's own names."""

    def __init__(self, first: int = 4) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.zeros(first, 8, 8))

    def forward(self, tokens: Tensor, numbers: Tensor, shares: Tensor) -> Tensor:
        return torch.einsum("tkoi,ti,tk->to", self.weight[numbers], tokens, shares)


def test_lists_beside_stacked_experts_are_sharded_like_dense_parameters():
    plan = sw.plan(Mixed(), mesh=MESH)
    assert [(each.fqn, bool(each.how)) for each in plan.expert_parallel] == [
        ("looped.experts", False),
        ("experts", True),
    ]
    assert "sharded like dense parameters" in plan.expert_parallel[0].reason


def test_modules_of_other_names_are_named_in_the_config():
    plan = sw.plan(Mixed(), sw.ShardConfig(expert=ExpertConfig(modules=("own", "experts"))), mesh=MESH)
    assert [each.fqn for each in plan.expert_parallel if each.how] == ["own", "experts"]
    for modules, problem in (
        (("nowhere",), "matches nothing"),
        (("looped.experts",), "a list of 4 Linear modules"),
        (("looped.router",), "its forward takes input"),
    ):
        with pytest.raises(PlanError, match=problem):
            sw.plan(Mixed(), sw.ShardConfig(expert=ExpertConfig(modules=modules)), mesh=MESH)


def test_experts_that_cannot_be_divided_are_refused_with_the_reason():
    named = sw.ShardConfig(expert=ExpertConfig(modules=("*",)))
    short = nn.Sequential(OwnExperts(first=3))
    with pytest.raises(PlanError, match=r"weight has shape \[3, 8, 8\], which is no stack of 4 experts"):
        sw.plan(short, named, mesh=MESH)
    tied = nn.Sequential(OwnExperts(), OwnExperts())
    tied[1].weight = tied[0].weight
    with pytest.raises(PlanError, match="tied to others"):
        sw.plan(tied, named, mesh=MESH)
    scaled = nn.Sequential(OwnExperts())
    scaled[0].register_buffer("scale", torch.ones(4))
    with pytest.raises(PlanError, match="its buffer scale has an element for each expert"):
        sw.plan(scaled, named, mesh=MESH)
    with pytest.raises(PlanError, match="some of its parameters are not sharded"):
        sw.plan(nn.Sequential(OwnExperts()), replace(named, ignored=("0.weight",)), mesh=MESH)


def test_both_a_tensor_and_an_expert_axis_are_refused():
    with pytest.raises(PlanError, match="tensor"):
        sw.plan(model(), mesh=sw.MeshConfig(tensor=2, expert=2, device="cpu"))
