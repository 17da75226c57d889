"""Clipping: the norm and the clipped gradients are those of one process, whatever is sharded how."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import ConfigError, ShardError
from shardwise.training.step import clip_grad_norm_
from tests.by_hand import (
    assert_same,
    full,
    full_gradients,
    loss_of,
    mesh_1d,
    mesh_2d,
    reference_gradients,
    shard_by_hand,
    shard_module,
    tiny,
    tokens,
)
from tests.ranks import ranks

NORMS = [1.0, 2.0, 3.0, math.inf]


def check(parameters: list[nn.Parameter], wholes: list[torch.Tensor], norm_type: float, max_norm: float) -> None:
    """Clip, and compare with torch on full gradients in one process."""
    twins = [nn.Parameter(torch.zeros_like(whole)) for whole in wholes]
    for twin, whole in zip(twins, wholes, strict=True):
        twin.grad = whole.clone()
    expected = torch.nn.utils.clip_grad_norm_(twins, max_norm, norm_type)
    norm = clip_grad_norm_(parameters, max_norm, norm_type)
    assert type(norm) is torch.Tensor
    assert norm.shape == ()
    wide = any(whole.dtype in (torch.float64, torch.complex128) for whole in wholes)
    assert norm.dtype == (torch.float64 if wide else torch.float32)
    torch.testing.assert_close(norm, expected.to(norm.dtype), rtol=1e-5, atol=1e-6)
    norms = [torch.zeros_like(norm) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, norm)
    assert all(torch.equal(other, norm) for other in norms), "the same on every rank"
    for parameter, twin in zip(parameters, twins, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(full(parameter.grad), twin.grad, rtol=1e-5, atol=1e-6)


def parameter(whole: torch.Tensor, mesh: DeviceMesh | None = None, placements: list | None = None) -> nn.Parameter:
    """A parameter whose gradient is `whole`, placed as asked."""
    if mesh is None:
        made = nn.Parameter(torch.zeros_like(whole))
        made.grad = whole.clone()
        return made
    made = nn.Parameter(distribute_tensor(torch.zeros_like(whole), mesh, placements))
    made.grad = distribute_tensor(whole.clone(), mesh, placements)
    return made


@ranks(2)
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("max_norm", [0.05, 100.0])
def test_sharded_model_clips_like_one_process(rank: int, norm_type: float, max_norm: float):
    reference = tiny()
    model = shard_by_hand(reference, mesh_1d(2))
    loss_of(model, tokens(rank)).backward()
    expected = reference_gradients(reference, [tokens(0), tokens(1)])
    trainable = [p for p in model.parameters() if p.grad is not None]
    check(trainable, list(expected.values()), norm_type, max_norm)


@ranks(4)
@pytest.mark.parametrize("norm_type", NORMS)
def test_any_mix_of_meshes_and_placements(rank: int, norm_type: float):
    """Whole, split evenly or not, on one or two axes, smaller than the mesh, in several dtypes, and plain."""
    grid, row = mesh_2d(), mesh_1d(4)
    wholes = [
        torch.randn(5, 3),
        torch.randn(8, 4),
        torch.randn(2, 8),
        torch.randn(1),
        torch.randn(6, 6),
        torch.randn(4, 4),
        torch.randn(()),
        torch.randn(7, dtype=torch.float64),
        torch.randn(3, 2),
    ]
    parameters = [
        parameter(wholes[0], row, [Shard(0)]),
        parameter(wholes[1], grid, [Replicate(), Shard(0)]),
        parameter(wholes[2], grid, [Replicate(), Shard(1)]),
        parameter(wholes[3], grid, [Replicate(), Shard(0)]),
        parameter(wholes[4], grid, [Shard(0), Shard(1)]),
        parameter(wholes[5], grid, [Shard(0), Replicate()]),
        parameter(wholes[6], grid, [Replicate(), Replicate()]),
        parameter(wholes[7], grid["shard"], [Shard(0)]),
        parameter(wholes[8]),
    ]
    check(parameters, wholes, norm_type, 0.5)


@ranks(4)
def test_tensor_parallel_beside_fsdp_only(rank: int):
    """The clip of torch fails here: 'All operands in aten.stack.default must have the same mesh'."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.LayerNorm(6))
    model = copy.deepcopy(reference)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    shard_module(model, mesh["shard"])
    inputs = torch.randn(2, 5, 6)
    model(inputs[mesh.get_local_rank("shard")]).pow(2).mean().backward()
    reference(inputs).pow(2).mean().backward()
    check(list(model.parameters()), [p.grad for p in reference.parameters()], 2.0, 0.1)  # pyrefly: ignore


@ranks(2)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_rank_without_gradients_takes_part(rank: int, norm_type: float):
    """Only rank 0 has gradients; a rank that left the collective out would hang the other."""
    mesh = mesh_1d(2)
    wholes = [torch.arange(4.0), torch.ones(6)]
    parameters = [parameter(whole, mesh, [Shard(0)]) for whole in wholes]
    if rank == 1:
        for made in parameters:
            made.grad = None
    norm = clip_grad_norm_(parameters, 1.0, norm_type)
    held = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])
    torch.testing.assert_close(norm, torch.linalg.vector_norm(held, norm_type))


@ranks(2)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_non_finite_norm_reaches_every_rank(rank: int, bad: float, norm_type: float):
    """The bad value is in rank 1's shard only."""
    whole = torch.ones(4)
    whole[3] = bad
    made = parameter(whole, mesh_1d(2), [Shard(0)])
    norm = clip_grad_norm_([made], 1.0, norm_type)
    assert torch.isnan(norm) if math.isnan(bad) else torch.isinf(norm)
    fresh = parameter(whole, mesh_1d(2), [Shard(0)])
    with pytest.raises(ShardError, match="norm is"):
        clip_grad_norm_([fresh], 1.0, norm_type, error_if_nonfinite=True)
    assert fresh.grad is not None
    torch.testing.assert_close(full(fresh.grad), whole, equal_nan=True)


@ranks(2)
def test_offloaded_gradients(rank: int):
    reference = tiny()
    model = shard_by_hand(reference, mesh_1d(2), offload_policy=CPUOffloadPolicy(pin_memory=False))
    loss_of(model, tokens(rank)).backward()
    expected = reference_gradients(reference, [tokens(0), tokens(1)])
    check([p for p in model.parameters() if p.grad is not None], list(expected.values()), 2.0, 0.1)


@ranks(2)
def test_model_given_whole_is_clipped_though_its_root_stands_gathered(rank: int):
    """After a forward without gradients `model.parameters()` shows copies that have none."""
    reference = tiny()
    model = shard_by_hand(reference, mesh_1d(2))
    loss_of(model, tokens(rank)).backward()
    with torch.no_grad():
        model(tokens(rank))
    expected = reference_gradients(reference, [tokens(0), tokens(1)])
    norm = clip_grad_norm_(model, 0.05)
    whole = torch.cat([grad.flatten() for grad in expected.values()]).norm()
    torch.testing.assert_close(norm, whole, rtol=1e-5, atol=1e-6)
    assert_same(full_gradients(model), {name: grad * (0.05 / whole) for name, grad in expected.items()})


class AllReduces(TorchDispatchMode):
    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += "allreduce" in str(func) or "all_reduce" in str(func)
        return func(*args, **(kwargs or {}))


@ranks(4)
def test_one_collective_however_many_parameters(rank: int):
    model = shard_by_hand(tiny(num_blocks=4), mesh_2d())
    loss_of(model, tokens(rank)).backward()
    with AllReduces() as counted:
        clip_grad_norm_(model.parameters(), 1.0)
    assert counted.num == 1


@ranks(2)
def test_sixteen_bit_gradients_are_summed_in_float32(rank: int):
    """4096 values of 1.0 have the norm 64; bfloat16 sums would stop growing at 256."""
    whole = torch.ones(4096, dtype=torch.bfloat16)
    made = parameter(whole, mesh_1d(2), [Shard(0)])
    norm = clip_grad_norm_([made], 32.0)
    assert abs(norm.item() - 64.0) < 1e-3
    assert made.grad is not None
    assert made.grad.dtype == torch.bfloat16
    assert torch.equal(full(made.grad), whole * 0.5)


@ranks(2)
def test_unreduced_gradient_is_refused(rank: int):
    mesh = mesh_1d(2)
    made = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()]))
    made.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    with pytest.raises(ShardError, match="not reduced yet"):
        clip_grad_norm_(made, 1.0)


@pytest.mark.parametrize("norm_type", NORMS)
def test_plain_gradients_in_any_form(norm_type: float):
    wholes = [torch.randn(3, 2), torch.randn(4, dtype=torch.complex64), torch.zeros(0)]
    total = torch.linalg.vector_norm(torch.cat([whole.abs().flatten() for whole in wholes]), norm_type)
    parameters = [*(parameter(whole) for whole in wholes), nn.Parameter(torch.ones(2))]  # the last has none
    torch.testing.assert_close(clip_grad_norm_(iter(parameters), 0.5, norm_type), total)
    assert parameters[0].grad is not None
    torch.testing.assert_close(parameters[0].grad, wholes[0] * (0.5 / (total + 1e-6)))
    torch.testing.assert_close(clip_grad_norm_(parameters[0], 1e9, 2.0), parameters[0].grad.norm())


def test_tied_parameter_given_twice_counts_once():
    made = parameter(torch.full((4,), 3.0))
    assert clip_grad_norm_([made, made], 3.0).item() == 6.0
    torch.testing.assert_close(made.grad, torch.full((4,), 1.5))


def test_no_parameters_or_no_gradients_give_zero():
    assert clip_grad_norm_([], 1.0).item() == 0.0
    assert clip_grad_norm_(nn.Linear(2, 2), 1.0, math.inf).item() == 0.0


def test_norm_type_must_be_positive():
    with pytest.raises(ConfigError, match="norm_type is 0"):
        clip_grad_norm_([], 1.0, 0)
