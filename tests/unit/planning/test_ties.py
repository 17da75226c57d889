"""One tensor under several names is found by identity and by storage, and stays one."""

import pytest
import torch
from torch import nn

from shardwise.config.schema import MeshConfig
from shardwise.errors import PlanError
from shardwise.planning.assignment import find_tensors
from shardwise.planning.planner import plan
from tests.toy_models import Block, Stack

TWO_RANKS = MeshConfig(shard=2, device="cpu")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_ties_by_identity_and_by_storage_are_one_tensor(device):
    with torch.device(device):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[2].weight = nn.Parameter(model[0].weight.detach())
    tied = [tensor for tensor in find_tensors(model) if len(tensor.names) > 1]
    assert [tensor.names for tensor in tied] == [("0.weight", "1.weight", "2.weight")]
    assert len(tied[0].parameters) == 2


def test_parameters_that_merely_share_a_flat_buffer_are_not_tied():
    flat = torch.randn(32)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].weight, model[1].weight = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[16:].view(4, 4))
    assert [tensor.names for tensor in find_tensors(model)] == [("0.weight",), ("1.weight",)]


def test_a_transposed_tie_is_refused():
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.detach().t())
    with pytest.raises(PlanError, match="share memory but are different views"):
        find_tensors(model)


def test_a_buffer_in_the_memory_of_a_trained_parameter_is_refused():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    model.register_buffer("anchor", model[0].weight.detach()[:2])
    with pytest.raises(PlanError, match=r"the buffer 'anchor' shares memory with the parameter '0.weight'"):
        find_tensors(model)
    find_tensors(model.requires_grad_(False))


def test_tied_leaves_share_a_group_that_is_held():
    model = Stack(nn.ModuleList([Block(), Block()]))
    model.head.weight = model.embed.weight
    result = plan(model, mesh=TWO_RANKS)
    tie = next(group for group in result.groups if group.kind == "tie")
    assert set(tie.modules) == {"embed", "head"}
    assert tie.held
    assert tie.parameters[0].aliases == ("head.weight",)


def test_a_tie_between_blocks_gets_a_group_inside_both():
    model = Stack(nn.ModuleList([Block(), Block(), Block()]))
    model.blocks[2].up.weight = model.blocks[0].up.weight
    names = [group.name for group in plan(model, mesh=TWO_RANKS).groups]
    assert names.index("blocks.0.up+blocks.2.up") < names.index("blocks.0") < names.index("blocks.2")


def test_a_module_shared_by_two_blocks_is_a_group():
    model = Stack(nn.ModuleList([Block(), Block()]))
    model.blocks[1].up = model.blocks[0].up
    shared = next(group for group in plan(model, mesh=TWO_RANKS).groups if group.modules == ("blocks.0.up",))
    assert shared.held


def test_a_tie_no_group_can_hold_is_replicated():
    class Odd(nn.Module):
        """The root's own parameter is also one inside a block."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])
            self.scale = self.blocks[0].norm.weight

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x * self.scale

    result = plan(Odd(), mesh=TWO_RANKS)
    assert [(p.fqn, p.aliases) for p in result.replicated] == [("scale", ("blocks.0.norm.weight",))]
