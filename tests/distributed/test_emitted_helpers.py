"""Functions that the codemod copies into programs, on ranks."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardwise.fsdp1 import emitted_helpers
from tests.ranks import ranks


@ranks(2)
def test_state_of_a_part_without_a_unit_of_its_own_is_whole(rank: int):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    whole = {name: value.clone() for name, value in model[1].state_dict().items()}
    fully_shard(model)
    state = emitted_helpers._whole_state(model[1])
    assert {name: value.shape for name, value in state.items()} == {name: value.shape for name, value in whole.items()}
    assert all(torch.equal(state[name], whole[name]) for name in whole)
    emitted_helpers._load_whole_state(model[1], {name: value + 1 for name, value in whole.items()})
    assert all(torch.equal(emitted_helpers._whole_state(model[1])[name], whole[name] + 1) for name in whole)


@ranks(2)
def test_each_group_that_shards_a_model_has_a_first_rank(rank: int):
    torch.manual_seed(0)
    for sizes, is_first in (((2,), rank == 0), ((2, 1), True)):
        model = nn.Linear(4, 6)
        whole = {name: value.clone() for name, value in model.state_dict().items()}
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
        state = emitted_helpers._on_first_rank(fully_shard(model, mesh=mesh), offload=True)
        assert state.keys() == (whole.keys() if is_first else set())
        assert all(torch.equal(state[name], whole[name]) for name in state)


@ranks(2)
def test_gradients_of_sharded_and_whole_parameters_are_clipped_together(rank: int):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    alone = copy.deepcopy(model)
    batch = torch.randn(3, 4)
    for one in (alone, fully_shard(model, ignored_params=set(model[1].parameters()))):
        one(batch).pow(2).sum().backward()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
    norm = emitted_helpers._clip_grad_norm(model.parameters(), 0.5)
    torch.testing.assert_close(norm, expected)
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        gradient = found.grad.full_tensor() if isinstance(found.grad, DTensor) else found.grad
        torch.testing.assert_close(gradient, wanted.grad)


@ranks(2)
def test_a_gradient_of_gathered_parameters_is_refused_when_the_block_has_ended(rank: int):
    model = fully_shard(nn.Linear(4, 4))
    batch = torch.ones(2, 4, requires_grad=True)
    with emitted_helpers._full_params(model):
        loss = nn.functional.linear(batch, model.weight).sum()
    with pytest.raises(RuntimeError, match="calling the sharded module"):
        loss.backward()
    model(batch).sum().backward()
    assert model.weight.grad is not None


@ranks(2)
def test_written_full_parameters_stay_within_the_mesh_of_their_model(rank: int):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("models", "shard"))
    torch.manual_seed(rank)  # two models, each on a mesh of one rank
    model = fully_shard(nn.Linear(2, 2, bias=False), mesh=mesh["shard"])
    before = model.weight.full_tensor().clone()
    with emitted_helpers._full_params(model, writeback=True, rank0_only=True):
        pass
    assert torch.equal(model.weight.full_tensor(), before)


@ranks(2)
def test_a_block_without_sync_inside_of_another_does_not_end_it(rank: int):
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(2, 2, bias=False))
    with emitted_helpers._no_sync(model):
        with emitted_helpers._no_sync(model):
            model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad is None  # nothing is reduced yet
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((2, 2), 3.0))
