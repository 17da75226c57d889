"""Which rows of a DTensor each of eight ranks holds: the rows carry their own numbers, and torch cuts them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardwise.errors import CheckpointError
from shardwise.sharding.inventory import full_tensor, gather_full, local_chunks, local_part, local_tensor, slices_of
from tests.ranks import ranks

SIZES = (1, 2, 3, 5, 8, 9, 13, 17, 24)


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def held_by(tensor: DTensor, full: torch.Tensor) -> torch.Tensor:
    """The elements that this rank is said to hold, which must be those that it does hold."""
    local = local_tensor(tensor)
    said = [(full[slices_of(c.starts, c.sizes)], local[slices_of(c.position, c.sizes)]) for c in local_chunks(tensor)]
    for expected, found in said:
        assert torch.equal(expected, found), (tensor.placements, tensor.device_mesh.get_coordinate())
    assert torch.equal(local_part(full, tensor), local)
    return torch.cat([torch.empty(0), *(part.flatten() for part, _ in said)])


def check_every_row_once(held: list[float], full: torch.Tensor) -> None:
    of_ranks: list[list[float]] = [[] for _ in range(8)]
    dist.all_gather_object(of_ranks, held)
    assert sorted(number for numbers in of_ranks for number in numbers) == full.flatten().tolist()


@ranks(8)
def test_fsdp_over_tensor_and_expert_parallelism(rank: int):
    """`(_StridedShard, Shard)` and three axes, uneven along all of them."""
    for shape in ((4, 2), (2, 4)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("shard", "tensor"))
        for size in SIZES:
            module, full = nn.Linear(1, 1), numbered(size, 2)
            module.weight = nn.Parameter(distribute_tensor(full, mesh["tensor"], [Shard(0)], src_data_rank=None))
            fully_shard(module, mesh=mesh["shard"])
            check_every_row_once(held_by(module.weight, full).tolist(), full)
            assert torch.equal(full_tensor(module.weight), full), (shape, size)
    experts = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("shard", "expert", "tensor"))
    hybrid = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    for rows, columns in ((8, 6), (7, 5), (3, 3), (1, 1)):
        full = numbered(rows, columns, 2)
        expert = distribute_tensor(full, experts["expert", "tensor"], [Shard(0), Shard(1)], src_data_rank=None)
        tensor = distribute_tensor(full, hybrid["tensor"], [Shard(0)], src_data_rank=None)
        for cut, data in ((expert, experts["shard"]), (tensor, hybrid["replicate", "shard"])):
            module = nn.Linear(1, 1)
            module.weight = nn.Parameter(cut)
            fully_shard(module, mesh=data)
            held_by(module.weight, full)
            assert torch.equal(full_tensor(module.weight), full), (module.weight.placements, rows)


PLACEMENTS: list[tuple[Placement, Placement]] = [
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(0), Shard(0)),
    (Replicate(), _StridedShard(0, split_factor=3)),
    (_StridedShard(0, split_factor=3), Shard(1)),
    (Shard(0), _StridedShard(0, split_factor=3)),
]


@ranks(8)
def test_placements_by_hand(rank: int):
    mesh = init_device_mesh("cpu", (4, 2))
    for placements in PLACEMENTS:
        for size in (24, 13):
            full = numbered(size, 6)
            tensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
            held_by(tensor, full)
            assert torch.equal(full_tensor(tensor), full), (placements, size)
        several = [
            numbered(size, 6).to(dtype) for size, dtype in ((24, torch.float64), (13, torch.bfloat16), (1, torch.bool))
        ]
        spread = [distribute_tensor(each, mesh, placements, src_data_rank=None) for each in several]
        for full, gathered in zip(several, gather_full(spread, [each.dtype for each in several]), strict=True):
            assert torch.equal(gathered, full), (placements, full.dtype)


@ranks(2)
def test_what_is_whole_everywhere_is_copied(rank: int):
    mesh, local = init_device_mesh("cpu", (2,)), numbered(3)
    full = full_tensor(DTensor.from_local(local, mesh, [Replicate()]))
    full.zero_()
    assert torch.equal(local, numbered(3))


@ranks(2)
def test_what_the_placements_do_not_say_is_refused(rank: int):
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(CheckpointError, match="partial sums"):
        local_chunks(DTensor.from_local(torch.ones(3), mesh, [Partial()]))
    strange = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], shape=torch.Size((9,)), stride=(1,))
    with pytest.raises(CheckpointError, match="cut unevenly"):
        local_chunks(strange)
