"""materialize(): initialisers run in the order in which building the model would run them, so it draws the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import ShardConfig, shard
from shardwise.sharding.materialize import materialize
from tests.by_hand import mesh_1d, shard_module
from tests.ranks import ranks

SEEDS: list[int] = []


class Probe(nn.Linear):
    """Notes the seed of the stream that initialisers draw from."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            SEEDS.append(torch.initial_seed())
        super().reset_parameters()


class Random(nn.Module):
    """Every kind of module that draws, in the order in which the constructor draws."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = Probe(4, 3)
        self.embed = nn.Embedding(7, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 4)) for _ in range(2))
        self.filter = nn.Conv1d(4, 3, 2)
        self.recurrent = nn.GRU(4, 3)
        self.head = nn.Linear(4, 7, bias=False)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in named}


@ranks(2)
@pytest.mark.parametrize("how", ["plain", "by-hand", "shard"])
def test_a_model_from_meta_has_the_numbers_of_one_that_was_built(rank: int, how: str):
    with torch.device("meta"):
        model = Random()
    if how == "by-hand":
        for block in (*model.blocks, model.embed, model):
            shard_module(block, mesh_1d(2))
    elif how == "shard":
        model = shard(model, ShardConfig())
    SEEDS.clear()
    torch.manual_seed(11)
    found = values(materialize(model))
    (seed,) = SEEDS
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        expected = values(Random())
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


class Numbered(nn.Module):
    """Writes the number of the call into its tensors."""

    calls = 0

    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(2))
        for number, child in enumerate(children):
            self.add_module(f"child{number}", child)
        self.register_buffer("table", torch.empty(3))

    def reset_parameters(self) -> None:
        Numbered.calls += 1
        nn.init.constant_(self.value, Numbered.calls)
        self.get_buffer("table").fill_(Numbered.calls)


@ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_children_come_before_their_parent_and_in_their_order(rank: int, sharded: bool):
    with torch.device("meta"):
        model = Numbered(Numbered(Numbered(), Numbered()), nn.Sequential(Numbered()), Numbered())
    if sharded:
        shard_module(model.get_submodule("child0"), mesh_1d(2))
        shard_module(model, mesh_1d(2))
    Numbered.calls = 0
    found = {name: tensor[0].item() for name, tensor in values(materialize(model)).items()}
    order = {"child0.child0": 1, "child0.child1": 2, "child0": 3, "child1.0": 4, "child2": 5, "": 6}
    expected = {f"{name}.{leaf}".lstrip("."): number for name, number in order.items() for leaf in ("value", "table")}
    assert found == expected
    assert Numbered.calls == 6, "each module is initialised once"


class Reset(nn.Module):
    """Its own reset is the weakest: 1 in both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(2, 2)), nn.Parameter(torch.empty(2))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0)
        nn.init.constant_(self.bias, 1.0)


class Parent(Reset):
    """Has children and tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = Reset()


class Framework(nn.Module):
    """Scales what reset wrote, as `_init_weights` of frameworks may."""

    def __init__(self) -> None:
        super().__init__()
        self.parent, self.leaf = Parent(), Reset()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Reset):
            with torch.no_grad():
                module.weight.mul_(5.0)


@ranks(2)
@pytest.mark.parametrize("with_init", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_the_user_comes_after_the_framework_and_that_after_the_module_itself(rank: int, with_init: bool, sharded: bool):
    def init(module: nn.Module) -> None:
        if isinstance(module, Reset):
            with torch.no_grad():
                module.weight.add_(2.0)
                module.bias.fill_(7.0)

    with torch.device("meta"):
        model = Framework()
    if sharded:
        shard_module(model, mesh_1d(2))
    found = values(materialize(model, init if with_init else None))
    for name, tensor in found.items():
        expected = (7.0 if with_init else 5.0) if name.endswith("weight") else (7.0 if with_init else 1.0)
        assert tensor.unique().tolist() == [expected], name


@ranks(2)
def test_what_the_user_writes_in_full_is_not_drawn_before(rank: int):
    """A weaker initialiser of a leaf that the strongest overwrites would only move the stream on."""
    drawn: list[str] = []

    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 2))

        def reset_parameters(self) -> None:
            drawn.append("reset")
            nn.init.normal_(self.weight)

    def init(module: nn.Module) -> None:
        if isinstance(module, Drawing):
            drawn.append("init")
            nn.init.constant_(module.weight, 3.0)

    with torch.device("meta"):
        model = nn.Sequential(Drawing(), Drawing())
    shard_module(model, mesh_1d(2))
    assert all(t.unique().tolist() == [3.0] for t in values(materialize(model, init)).values())
    assert drawn == ["init", "init"]
