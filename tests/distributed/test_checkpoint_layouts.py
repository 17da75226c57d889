"""Sharded checkpoints between layouts: any world size and mesh in, any out, by us and by torch's own DCP."""

import copy
import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from shardwise.checkpointing.contents import LocalChunk
from shardwise.checkpointing.formats.dcp import read_dcp
from shardwise.checkpointing.formats.sharded import (
    Header,
    begin_checkpoint,
    commit_checkpoint,
    file_name,
    partial_of,
    write_rank_file,
)
from shardwise.checkpointing.names import local_chunks
from shardwise.checkpointing.reading import Request, check_requests, read_requests
from shardwise.checkpointing.storage import join
from shardwise.distributed.agreement import on_rank_zero
from shardwise.planning.settings import dtype_name
from tests.ranks import ranks

# Rows that divide by no world size, fewer rows than ranks, other dtypes, a scalar.
SHAPES = {"even": (12, 4), "odd": (7, 5), "few": (2, 3), "cube": (5, 3, 4), "vector": (11,), "scalar": ()}


def global_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    state = {f"model.{name}": torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    state["model.half"] = torch.randn(9, 2, generator=generator).bfloat16()
    state["model.count"] = torch.arange(10)
    return state


def placed(tensor: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """As `fully_shard` places it: a scalar has no dimension to shard."""
    wanted = [Replicate() if isinstance(each, Shard) and each.dim >= tensor.dim() else each for each in placements]
    return distribute_tensor(tensor, mesh, wanted, src_data_rank=None)


def save(folder: Path, state: Mapping[str, DTensor], rank: int, num_ranks: int) -> None:
    """Every rank writes what it holds and no other rank with a lower number holds, too."""
    if rank == 0:
        begin_checkpoint(folder)
    dist.barrier()
    records = [None] * dist.get_world_size()
    record = None
    if rank < num_ranks:
        items = []
        for name, tensor in state.items():
            coordinate = tensor.device_mesh.get_coordinate()
            replicated = [
                place for place, at in zip(tensor.placements, coordinate, strict=True) if at and place.is_replicate()
            ]
            if not replicated:
                for spec, memory in local_chunks(tensor):
                    items.append(
                        LocalChunk(name, dtype_name(tensor.dtype), tuple(tensor.shape), spec, memory.contiguous())
                    )
        record = write_rank_file(join(partial_of(folder), file_name(rank)), items, fsync=False, block_bytes=32)
    dist.all_gather_object(records, record)
    header = Header(step=1, world_size=num_ranks, structure={name: tuple(name.split(".", 1)) for name in state})
    on_rank_zero(lambda: commit_checkpoint(folder, [each for each in records if each], header, fsync=False))


def load(folder: Path, state: Mapping[str, DTensor]) -> None:
    contents = read_dcp(folder)
    requests = [Request(name, memory, spec) for name, tensor in state.items() for spec, memory in local_chunks(tensor)]
    assert not check_requests(contents, requests)
    read_requests(contents, requests)


def layouts(world: int) -> dict[str, tuple[DeviceMesh, list[Placement], int]]:
    """Meshes over the first ranks; making one is collective over all."""
    found: dict[str, tuple[DeviceMesh, list[Placement], int]] = {}
    for size in (1, 2, 3, 4):
        if size <= world:
            found[f"shard {size}"] = (DeviceMesh("cpu", list(range(size))), [Shard(0)], size)
    if world == 4:
        found["hsdp 2x2"] = (init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)], 4)
        found["shard dim 1"] = (DeviceMesh("cpu", [0, 1, 2, 3]), [Shard(1)], 4)
        found["two axes"] = (init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)], 4)
    return found


@ranks(4, timeout_s=120)
def test_every_layout_reads_every_layout_bitwise(rank: int, tmp_path: Path):
    """4 to 2 to 3 to 1 ranks, HSDP, other dimensions, two axes: all pairs."""
    state, meshes = global_state(), layouts(4)
    for number, (mesh, placements, size) in enumerate(meshes.values()):
        here = rank < size
        sharded = {name: placed(tensor, mesh, placements) for name, tensor in state.items()} if here else {}
        save(tmp_path / f"step-{number:08d}", sharded, rank, size)
    for (saved, _), (wanted, (mesh, placements, size)) in itertools.product(enumerate(meshes), meshes.items()):
        if rank >= size:
            continue
        blank = {name: placed(torch.zeros_like(tensor), mesh, placements) for name, tensor in state.items()}
        load(tmp_path / f"step-{saved:08d}", blank)
        for name, tensor in state.items():
            expected = placed(tensor, mesh, placements).to_local()
            assert torch.equal(blank[name].to_local(), expected), (list(meshes)[saved], wanted, name)


@ranks(4, timeout_s=120)
def test_torch_reads_what_we_write_in_every_layout(rank: int, tmp_path: Path):
    state = global_state()
    meshes = {name: layout for name, layout in layouts(4).items() if layout[2] == 4}
    for number, (saved, wanted) in enumerate(itertools.permutations(meshes, 2)):
        folder = tmp_path / f"step-{number:08d}"
        mesh, placements, _ = meshes[saved]
        save(folder, {name: placed(tensor, mesh, placements) for name, tensor in state.items()}, rank, 4)
        mesh, placements, _ = meshes[wanted]
        blank = {name: placed(torch.zeros_like(tensor), mesh, placements) for name, tensor in state.items()}
        nested = {"model": {name.removeprefix("model."): tensor for name, tensor in blank.items()}}
        dcp.load(nested, checkpoint_id=folder)
        for name, tensor in state.items():
            expected = placed(tensor, mesh, placements).to_local()
            assert torch.equal(blank[name].to_local(), expected), (saved, wanted, name)


@ranks(4, timeout_s=120)
def test_we_read_what_torch_writes_in_every_layout(rank: int, tmp_path: Path):
    state = global_state()
    meshes = {name: layout for name, layout in layouts(4).items() if layout[2] == 4}
    for number, (saved, wanted) in enumerate(itertools.permutations(meshes, 2)):
        folder = tmp_path / str(number)
        mesh, placements, _ = meshes[saved]
        dcp.save({name: placed(tensor, mesh, placements) for name, tensor in state.items()}, checkpoint_id=folder)
        mesh, placements, _ = meshes[wanted]
        blank = {name: placed(torch.zeros_like(tensor), mesh, placements) for name, tensor in state.items()}
        load(folder, blank)
        for name, tensor in state.items():
            expected = placed(tensor, mesh, placements).to_local()
            assert torch.equal(blank[name].to_local(), expected), (saved, wanted, name)


@ranks(2)
def test_a_flipped_byte_is_caught_where_dcp_takes_it(rank: int, tmp_path: Path):
    """The reason for our manifest: torch's own reader loads the damaged number without a word."""
    mesh, placements, _ = layouts(2)["shard 2"]
    state = {"model.even": placed(torch.ones(12, 4), mesh, placements)}
    save(tmp_path / "step-00000001", state, rank, 2)
    chunk = read_dcp(tmp_path / "step-00000001").tensors["model.even"].chunks[rank]
    path = tmp_path / "step-00000001" / chunk.file
    data = bytearray(path.read_bytes())
    data[chunk.offset + 5] ^= 64
    path.write_bytes(data)
    dist.barrier()
    blank = copy.deepcopy(state)
    dcp.load({"model": {"even": blank["model.even"]}}, checkpoint_id=tmp_path / "step-00000001")
    assert not torch.equal(blank["model.even"].to_local(), state["model.even"].to_local())
    with pytest.raises(Exception, match=r"model\.even.*\n.*" + chunk.file):
        load(tmp_path / "step-00000001", copy.deepcopy(state))
