"""plan(): complete, printable, equal when made again, and careful about what it is given."""

import pytest
import torch
from torch import nn

from shardwise.config.schema import GroupOverride, MeshConfig, PrefetchConfig, ShardConfig
from shardwise.errors import PlanError
from shardwise.planning.plan import Plan
from shardwise.planning.planner import plan
from tests.toy_models import Block, Stack

TWO_RANKS = MeshConfig(shard=2, device="cpu")
FOUR_RANKS = MeshConfig(shard=4, device="cpu")


def make(num_blocks: int = 4) -> Stack:
    return Stack(nn.ModuleList([Block() for _ in range(num_blocks)]))


def test_every_parameter_is_in_exactly_one_place():
    model = make()
    model.head.weight = model.embed.weight
    model.scale = nn.Parameter(torch.tensor(1.0))
    result = plan(model, ShardConfig(ignored=("norm",)), mesh=TWO_RANKS)
    planned = [name for p in result.parameters for name in (p.fqn, *p.aliases)]
    assert sorted(planned) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))


def test_a_plan_survives_json():
    result = plan(make(), ShardConfig(prefetch=PrefetchConfig(forward=2, backward=1)), mesh=FOUR_RANKS)
    again = Plan.from_json(result.to_json())
    assert again == result
    assert again.digest() == result.digest()
    assert str(again) == str(result)


def test_a_plan_of_another_format_is_refused():
    text = plan(make(), mesh=TWO_RANKS).to_json().replace('"format": 1', '"format": 99')
    with pytest.raises(PlanError, match="format 99"):
        Plan.from_json(text)


def test_meta_and_real_models_have_the_same_plan():
    with torch.device("meta"):
        on_meta = make()
    assert plan(on_meta, mesh=TWO_RANKS) == plan(make(), mesh=TWO_RANKS)


def test_the_plan_is_printed_as_a_tree_with_reasons():
    text = str(plan(make(), mesh=TWO_RANKS))
    assert "blocks.0 … blocks.3" in text  # a run of equal blocks is one row
    assert "Block, one of 4 in blocks" in text
    assert "float32 → storage, reduce float32" in text


def test_planning_changes_nothing():
    model = make()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    classes = [type(module) for module in model.modules()]
    plan(model, mesh=TWO_RANKS)
    assert [type(module) for module in model.modules()] == classes
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_fused_experts_are_split_where_it_saves_memory():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.empty(8, 4096, 14336, device="meta"))

        def forward(self, x):
            return x @ self.up

    result = plan(nn.Sequential(Experts(), Experts()), mesh=MeshConfig(shard=64, device="cuda"))
    first = result.groups[0].parameters[0]
    assert first.shard_dim == 1
    assert "8.0x" in first.reason
    whole = 2 * 8 * 4096 * 14336 * 4
    assert result.bytes_per_rank == whole // 64
    padded = plan(nn.Sequential(Experts(), Experts()), ShardConfig(shard_dim="first"), mesh=MeshConfig(shard=64))
    assert padded.bytes_per_rank == 8 * result.bytes_per_rank


def test_an_int_reshard_must_divide_the_shard_axis():
    assert plan(make(), ShardConfig(reshard_after_forward=2), mesh=FOUR_RANKS).groups[1].reshard_after_forward == 2
    assert plan(make(), ShardConfig(reshard_after_forward=4), mesh=FOUR_RANKS).groups[1].reshard_after_forward is True
    for bad in (3, 8, 1):
        with pytest.raises(PlanError, match=f"reshard_after_forward = {bad} does not fit") as error:
            plan(make(), ShardConfig(reshard_after_forward=bad), mesh=FOUR_RANKS)
        assert "[2, 4]" in error.value.fix


def test_the_root_stays_gathered_unless_the_user_says_otherwise():
    def policies(value):
        result = plan(make(), ShardConfig(reshard_after_forward=value), mesh=FOUR_RANKS)
        return result.groups[1].reshard_after_forward, result.root.reshard_after_forward

    assert policies(None) == (True, False)
    assert policies(True) == (True, True)
    assert policies(False) == (False, False)
    assert policies(2) == (2, False)


def test_prefetch_names_neighbours_of_the_same_run():
    result = plan(make(), ShardConfig(prefetch=PrefetchConfig(forward=2, backward=1)), mesh=TWO_RANKS)
    blocks = {group.name: group for group in result.groups}
    assert blocks["blocks.0"].forward_prefetch == ("blocks.1", "blocks.2")
    assert blocks["blocks.3"].forward_prefetch == ()
    assert blocks["blocks.0"].backward_prefetch == ()
    assert blocks["blocks.2"].backward_prefetch == ("blocks.1",)
    assert blocks["embed"].forward_prefetch == ()


def test_overrides_cover_what_is_below_them_and_the_last_wins():
    config = ShardConfig(
        overrides=(
            GroupOverride(pattern="blocks.*", reshard_after_forward=False),
            GroupOverride(pattern="blocks.1", reshard_after_forward=True, offload=True),
        )
    )
    groups = {group.name: group for group in plan(make(), config, mesh=TWO_RANKS).groups}
    assert groups["blocks.0"].reshard_after_forward is False
    assert groups["blocks.1"].reshard_after_forward is True
    assert groups["blocks.1"].offload
    assert not groups["blocks.0"].offload
    assert groups["embed"].reshard_after_forward is True


def test_odd_parameters_are_replicated_rewritten_or_left():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.empty = nn.Parameter(torch.empty(0, 4))
            self.strided = nn.Parameter(torch.randn(6, 4).t())
            self.codes = nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x * self.scalar

    result = plan(Odd(), mesh=TWO_RANKS)
    assert {p.fqn for p in result.replicated} == {"scalar", "empty"}
    assert {p.fqn for p in result.ignored} == {"codes"}
    strided = next(p for p in result.root.parameters if p.fqn == "strided")
    assert strided.make_contiguous
    assert "row-major" in strided.reason


def test_entry_points_are_listed_with_their_group():
    class Talker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x):
            return self.generate(x)

        def generate(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    assert ":generate" in plan(Talker(), mesh=TWO_RANKS).root.entry_points


def test_example_inputs_give_the_same_groups_as_the_source():
    model = make()
    ids = torch.zeros(2, 3, dtype=torch.long)
    assert [g.modules for g in plan(model, mesh=TWO_RANKS, example_inputs=(ids,)).groups] == [
        g.modules for g in plan(model, mesh=TWO_RANKS).groups
    ]


def test_a_tensor_axis_of_one_rank_changes_nothing():
    assert plan(make(), mesh=MeshConfig(shard=2, tensor=1, device="cpu")) == plan(make(), mesh=TWO_RANKS)


def test_a_scripted_module_is_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(PlanError, match=r"^1 \(\w+\) is a scripted module with parameters"):
        plan(model)


def test_an_embedding_that_renormalizes_rows_is_refused_by_name():
    model = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0), nn.Linear(2, 2))
    with pytest.raises(PlanError, match=r"0 \(Embedding\) renormalizes the rows") as caught:
        plan(model)
    assert "0.weight.renorm_(2.0, 0, 1.0)" in str(caught.value)
    model[0].requires_grad_(False)
    plan(model)


def test_what_cannot_be_sharded_is_refused_with_its_name():
    lazy = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(8))
    with pytest.raises(PlanError, match=r"1 \(LazyLinear\) has parameters without a shape yet"):
        plan(lazy, mesh=TWO_RANKS)
    sparse = nn.Sequential(nn.Embedding(16, 8, sparse=True), nn.Linear(8, 8))
    with pytest.raises(PlanError, match=r"0 \(Embedding\) makes sparse gradients"):
        plan(sparse, mesh=TWO_RANKS)
    sparse[0].requires_grad_(False)
    assert plan(sparse, mesh=TWO_RANKS).groups


def test_a_model_that_cannot_tell_its_embeddings_is_planned():
    class Vision(Stack):
        def get_input_embeddings(self) -> nn.Module:  # as AIMv2 and PatchTST of transformers
            raise NotImplementedError

    blocks = nn.ModuleList([Block() for _ in range(2)])
    assert plan(Vision(blocks), mesh=TWO_RANKS).groups
