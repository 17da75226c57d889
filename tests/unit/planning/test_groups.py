"""Groups are found for any model, from its structure alone."""

import pytest
import torch
from torch import nn

from shardwise.config.schema import MeshConfig, ShardConfig
from shardwise.planning.plan import Plan
from shardwise.planning.planner import plan
from tests.toy_models import Block, Stack

TWO_RANKS = MeshConfig(shard=2, device="cpu")


def modules_of(result: Plan) -> list[str]:
    return [group.name for group in result.groups]


def planned(model: nn.Module, **settings) -> Plan:
    return plan(model, ShardConfig(**settings), mesh=TWO_RANKS)


@pytest.mark.parametrize(
    ("holder", "names"),
    [
        (lambda blocks: nn.ModuleList(blocks), ["blocks.0", "blocks.1", "blocks.2"]),
        (lambda blocks: nn.Sequential(*blocks), ["blocks.0", "blocks.1", "blocks.2"]),
        (
            lambda blocks: nn.ModuleDict({f"b{i}": b for i, b in enumerate(blocks)}),
            ["blocks.b0", "blocks.b1", "blocks.b2"],
        ),
        (
            lambda blocks: nn.ModuleList([blocks[0], nn.Sequential(*blocks[1:])]),
            ["blocks.0", "blocks.1.0", "blocks.1.1"],
        ),
    ],
    ids=["list", "sequence", "dict", "nested"],
)
def test_blocks_are_found_in_any_holder(holder, names):
    result = planned(Stack(holder([Block(), Block(), Block()])))
    assert modules_of(result) == ["embed", *names, "head", "(root)"]


def test_blocks_held_as_plain_attributes_are_found_by_their_class():
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.first, self.second = nn.Linear(8, 8), Block(), Block()

        def forward(self, x):
            return self.second(self.first(self.inp(x)))

    assert modules_of(planned(Plain())) == ["first", "second", "(root)"]


def test_a_tiny_model_is_grouped_like_its_large_sibling():
    with torch.device("meta"):
        tiny = Stack(nn.ModuleList([Block(8) for _ in range(3)]), dim=8, vocab=64)
        large = Stack(nn.ModuleList([Block(4096) for _ in range(3)]), dim=4096, vocab=32768)
    assert modules_of(planned(tiny)) == modules_of(planned(large))


def test_stages_are_cut_into_their_blocks():
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.reduce = nn.ModuleList([Block(), Block()]), nn.Linear(8, 8)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.reduce(x)

    result = planned(nn.Sequential(Stage(), Stage()))
    assert modules_of(result) == ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1", "(root)"]


def test_a_convolution_with_its_norm_is_no_block_inside_a_block():
    def dressed() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([dressed(), dressed()])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    assert modules_of(planned(nn.Sequential(Residual(), Residual()))) == ["0", "1", "(root)"]


def test_experts_picked_by_data_stay_in_their_block():
    """Ranks pick different experts; a group of its own would be gathered on some ranks only."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList([Block() for _ in range(4)])

        def forward(self, x):
            chosen = self.gate(x).argmax(-1)
            out = torch.zeros_like(x)
            for index in chosen.unique().tolist():
                rows = chosen == index
                out[rows] = self.experts[index](x[rows])
            return out

    result = planned(nn.Sequential(Experts(), Experts()))
    assert modules_of(result) == ["0", "1", "(root)"]
    assert result.groups[0].reduce_unused
    assert result.track_unused


def test_the_root_never_outweighs_every_other_group():
    class Wide(nn.Module):
        """Many leaves, none of them large, next to two small blocks."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])
            for index in range(12):
                self.add_module(f"leaf{index}", nn.Linear(8, 12))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return sum(getattr(self, f"leaf{index}")(x) for index in range(12))

    result = planned(Wide())
    assert result.root.numel <= max(group.numel for group in result.groups[:-1])
    assert any("taken out of the root" in group.reason for group in result.groups)


def test_a_model_of_leaves_only_is_not_sharded_as_one():
    result = planned(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)))
    assert modules_of(result) == ["0", "2", "4", "(root)"]


def test_bypassed_blocks_are_gathered_by_their_parts():
    class Joint(nn.Module):
        """Never calls a block, only what is inside."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x):
            for block in self.blocks:
                x = x + block.down(block.up(block.norm(x)).relu())
            return x

    result = planned(Joint())
    assert result.groups[0].modules == ("blocks.0.norm", "blocks.0.up", "blocks.0.down")
    assert result.groups[0].kind == "part"
    assert "called directly" in result.groups[0].reason


def test_weights_read_by_a_caller_are_held_for_the_whole_pass():
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = nn.Embedding(64, 8), nn.ModuleList([Block(), Block()])

        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return nn.functional.linear(x, self.embed.weight)

    result = planned(Functional())
    embed = next(group for group in result.groups if group.modules == ("embed",))
    assert embed.held
    assert embed.reshard_after_forward is False
    assert "reads its weights" in embed.reason


def test_a_branch_that_data_decide_is_held():
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x):
            if x.sum() > 0:
                return self.first(x)
            return self.second(x)

    result = planned(Branching())
    assert all(group.held and group.reduce_unused for group in result.groups[:-1])


def test_wrap_attributes_are_obeyed():
    model = Stack(nn.ModuleList([Block(), Block()]))
    model.blocks[0]._fsdp_wrap = False
    model.head._fsdp_wrap = False
    names = modules_of(planned(model))
    assert "blocks.1" in names
    assert "blocks.0" not in names
    assert "head" not in names
