"""Functions that the codemod copies into programs, on ranks."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

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
