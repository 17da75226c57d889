"""A group of one rank casts where FSDP2 copies: the same parameters, gradients and sums."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardwise import compat
from shardwise.config.schema import LoraConfig, MeshConfig, PrecisionConfig, ShardConfig
from shardwise.distributed.mesh import init_distributed
from shardwise.sharding.adapters import add_lora
from shardwise.sharding.apply import shard
from shardwise.sharding.full_params import iter_full_tensors
from tests.ranks import ranks


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 3))


@pytest.mark.parametrize("dtype", ["bfloat16", "storage"])
@ranks(1)
def test_same_bits_as_fully_shard(rank: int, dtype: str):
    mesh = init_distributed(MeshConfig(device="cpu"))
    ours = shard(network(), ShardConfig(precision=PrecisionConfig(param_dtype=dtype)), mesh=mesh)
    narrow = torch.bfloat16 if dtype == "bfloat16" else None
    theirs = fully_shard(network(), mesh=mesh, mp_policy=MixedPrecisionPolicy(narrow, torch.float32))
    hooked: list[int] = []
    next(ours.parameters()).register_post_accumulate_grad_hook(lambda _: hooked.append(1))
    for _ in range(3):  # gradients are summed
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
        for model in (ours, theirs):
            model(x).float().square().sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.grad.dtype == mine.dtype
        assert torch.equal(mine.grad.full_tensor(), other.grad.full_tensor())
    assert len(hooked) == 3


@ranks(1)
def test_gradients_stay_narrow_until_something_is_added(rank: int):
    mesh = init_distributed(MeshConfig(device="cpu"))
    model = shard(network(), ShardConfig(precision=PrecisionConfig(param_dtype="bfloat16")), mesh=mesh)
    wide = copy.deepcopy(network())
    x = torch.randn(4, 8)
    sharded_twice = shard(wide, ShardConfig(precision=PrecisionConfig(param_dtype="bfloat16")), mesh=mesh)
    assert compat.keep_gradient_dtype(model)
    for dtype in (torch.bfloat16, torch.float32):
        for each in (model, sharded_twice):
            each(x).float().square().sum().backward()
        for mine, other in zip(model.parameters(), sharded_twice.parameters(), strict=True):
            assert mine.grad.dtype == dtype
            assert torch.equal(mine.grad.full_tensor().float(), other.grad.full_tensor())


@ranks(2)
def test_two_ranks_are_left_alone(rank: int):
    mesh = init_distributed(MeshConfig(device="cpu"))
    model = shard(network(), mesh=mesh)
    assert not compat.keep_gradient_dtype(model)


@ranks(2)
def test_subclasses_of_several_tensors_on_an_axis_of_one_rank(rank: int):
    """Torch copies the first tensor of a subclass only where the axis that shards has one rank; NF4 has two."""
    meshes = [init_distributed(MeshConfig(device="cpu", shard=shard, replicate=2 // shard)) for shard in (1, 2)]
    results = []
    for mesh in meshes:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
        adapted = shard(add_lora(model, LoraConfig(targets=("Linear",), quantize="nf4")), mesh=mesh)
        optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
        for step in range(3):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
            adapted(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append({name: tensor.clone() for name, tensor in iter_full_tensors(adapted)})
    assert any("lora" in name for name in results[0])
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name
