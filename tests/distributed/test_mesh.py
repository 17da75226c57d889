"""init_distributed(): one process or many, the same path, and a message for what does not fit."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import plan, prepare_fully_shard, shard
from shardwise.config.schema import EXPERT_SHARD_AXES, MeshConfig
from shardwise.distributed.agreement import agree_on, gather_objects
from shardwise.distributed.launchers import Launch
from shardwise.distributed.local_ranks import start_local
from shardwise.distributed.mesh import (
    _device_index,
    axis_names,
    axis_sizes,
    data_parallel_mesh,
    data_parallel_rank,
    default_mesh,
    draw_mesh,
    fsdp_mesh,
    gradient_mesh,
    init_distributed,
    make_mesh,
    random_stream,
    refuse_shared_cards,
    shutdown,
    tensor_mesh,
)
from shardwise.errors import ConfigError, EnvironmentProblem, PlanError
from shardwise.fsdp1 import FullyShardedDataParallel, ShardingStrategy
from tests.ranks import ranks


def join_and_sum() -> tuple[tuple[str, ...] | None, tuple[int, ...], float]:
    """What a script does: join, use the mesh, leave."""
    mesh = init_distributed(MeshConfig(replicate=2))
    total = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(total, group=mesh.get_group("replicate"))
    shutdown()
    return mesh.mesh_dim_names, tuple(mesh.shape), total.item()


@pytest.mark.usefixtures("fork_server")
def test_ranks_of_a_launcher_form_a_mesh():
    results = start_local("tests.distributed.test_mesh:join_and_sum", 2)
    assert results == [(("replicate", "shard"), (2, 1), 3.0)] * 2


def test_single_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    mesh = init_distributed()
    try:
        assert (mesh.mesh_dim_names, tuple(mesh.shape), mesh.device_type) == (("shard",), (1,), "cpu")
        assert default_mesh() is mesh
        assert init_distributed() is mesh
        total = torch.ones(2)
        dist.all_reduce(total, group=mesh.get_group())
        assert torch.equal(total, torch.ones(2))
    finally:
        shutdown()
    assert not dist.is_initialized()


def test_default_mesh_is_made_anew_with_the_process_group():
    first = default_mesh()
    dist.destroy_process_group()  # as a script may do that does not know of shutdown()
    second = default_mesh()
    try:
        assert second is not first
        assert second.size() == 1
    finally:
        shutdown()


def test_mesh_that_does_not_fit_is_refused_before_the_ranks_meet():
    with pytest.raises(ConfigError, match="a shard 3 x tensor 2 mesh needs 6 ranks, got 1") as failure:
        init_distributed(MeshConfig(tensor=2, shard=3))
    assert failure.value.where == "mesh.shard, mesh.tensor"
    with pytest.raises(ConfigError, match="a 2 x 3 mesh needs 6 ranks, got 1"):
        init_distributed(MeshConfig(replicate=2, shard=3))
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_absent_gpu_is_named():
    with pytest.raises(EnvironmentProblem, match=r"mesh\.device is cuda, but this process sees no accelerator"):
        init_distributed(MeshConfig(device="cuda"))
    assert not dist.is_initialized()


@ranks(4)
def test_existing_process_group_is_used(rank: int):
    group = dist.group.WORLD
    mesh = init_distributed(MeshConfig(replicate=2))
    try:
        assert dist.group.WORLD is group
        assert mesh.mesh_dim_names == ("replicate", "shard")
        assert tuple(mesh.shape) == (2, 2)
        with pytest.raises(ConfigError, match="needs 3 ranks, got 4"):
            init_distributed(MeshConfig(shard=3))
    finally:
        assert tuple(init_distributed().shape) == (4,)  # the pool's next test gets a mesh of all ranks


@ranks(2)
def test_mesh_without_tensor_axis_is_data_parallel_as_it_is(rank: int):
    mesh = init_distributed()
    assert tuple(mesh.shape) == (2,)
    assert data_parallel_mesh(mesh) is mesh
    unnamed = init_device_mesh("cpu", (2,))
    assert data_parallel_mesh(unnamed) is unnamed


@ranks(2)
def test_mesh_whose_axes_cannot_be_told_apart_is_refused(rank: int):
    with pytest.raises(PlanError, match="the 2-D mesh has no axis names"):
        data_parallel_mesh(init_device_mesh("cpu", (2, 1)))
    with pytest.raises(PlanError, match="the mesh has 3 data-parallel axes: a, b, c"):
        data_parallel_mesh(init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c")))
    with pytest.raises(PlanError, match="'fsdp' and 'dp_shard' both mean 'shard'"):
        data_parallel_mesh(init_device_mesh("cpu", (2, 1), mesh_dim_names=("fsdp", "dp_shard")))
    with pytest.raises(PlanError, match="the mesh has no shard axis: pipeline"):
        data_parallel_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("pipeline",)))
    with pytest.raises(PlanError, match="the mesh axis 'sp' has 2 ranks, and its name is ambiguous"):
        data_parallel_mesh(init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "sp")))


def ranks_of(mesh: DeviceMesh | None) -> object:
    return None if mesh is None else mesh.mesh.tolist()


@ranks(4)
def test_each_part_of_a_model_gets_the_axes_it_needs(rank: int):
    """Flattened axes are one axis, and a slice of the run's mesh, so that FSDP2 can join it with the tensor axis."""
    mesh = init_distributed(MeshConfig(expert=2, tensor=2))
    assert axis_sizes(mesh) == {"shard": 1, "expert": 2, "tensor": 2}
    assert data_parallel_rank(mesh) == rank // 2
    column = [rank % 2, rank % 2 + 2]
    assert ranks_of(gradient_mesh(mesh)) == [column]
    assert ranks_of(fsdp_mesh(mesh)) == column
    assert fsdp_mesh(mesh) is fsdp_mesh(mesh)
    assert ranks_of(fsdp_mesh(mesh, EXPERT_SHARD_AXES)) == [rank]
    assert ranks_of(tensor_mesh(mesh)) == [rank // 2 * 2, rank // 2 * 2 + 1]
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=fsdp_mesh(mesh).get_group())
    assert total.item() == sum(column)
    hybrid = init_distributed(MeshConfig(replicate=2, shard=1, context=2))
    try:
        assert ranks_of(fsdp_mesh(hybrid)) == [[0, 1], [2, 3]]
        assert fsdp_mesh(hybrid).mesh_dim_names == ("replicate", "shard_context")
        assert (data_parallel_rank(hybrid), tensor_mesh(hybrid)) == (rank // 2, None)
    finally:
        init_distributed()


@ranks(2)
def test_axes_are_known_by_the_names_of_other_code(rank: int):
    sizes = {("dp_replicate", "dp_shard", "tp"): ("replicate", "shard", "tensor"), ("dp", "tp"): ("shard", "tensor")}
    sizes |= {("pp", "dp", "fsdp", "cp"): ("pipeline", "replicate", "shard", "context"), ("data",): ("shard",)}
    for names, meanings in sizes.items():
        mesh = init_device_mesh("cpu", (2,) + (1,) * (len(names) - 1), mesh_dim_names=names)
        kept = [m for m in meanings if m in ("replicate", "shard") or m == meanings[0]]
        assert axis_names(mesh) == {m: n for n, m in zip(names, meanings, strict=True) if m in kept}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


@ranks(2)
@pytest.mark.parametrize("axis", ["context", "cp", "expert", "ep"])
def test_axis_along_which_weights_would_diverge_is_refused_on_every_rank(rank: int, axis: str):
    """Nothing reduces gradients over it, so its ranks would train models of their own."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", axis))
    hybrid = ShardingStrategy.HYBRID_SHARD
    unbuilt = {
        "shard": lambda: shard(net(), mesh=mesh),
        "plan": lambda: plan(net(), mesh=mesh),
        "prepare_fully_shard": lambda: prepare_fully_shard(net(), config={"device_mesh": mesh}),
    }
    uses = {
        "shard, one axis": lambda: shard(net(), mesh=mesh[axis]),
        "fsdp1": lambda: FullyShardedDataParallel(net(), device_mesh=mesh, sharding_strategy=hybrid),
        "fsdp1, one axis": lambda: FullyShardedDataParallel(net(), device_mesh=mesh[axis]),
    }
    for name, use in (unbuilt | uses).items():
        expected = f"the mesh axis '.*' has 2 ranks|the mesh has no shard axis: {axis}|Sequential has no blocks"
        with pytest.raises(PlanError, match=expected) as failure:
            use()
        error = failure.value
        agree_on(str(error), f"the error of {name}")
        assert "MeshConfig(shard=" in error.fix or "mesh.context = 1" in error.fix


@ranks(2)
def test_tensor_axis_of_one_rank_changes_nothing(rank: int):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tp"))
    assert plan(net(), mesh=mesh) == plan(net(), mesh=mesh["shard"])
    model = shard(net(), mesh=mesh)
    model(torch.ones(2, 8) * rank).sum().backward()
    assert model[0].weight.to_local().shape == (4, 8)


@ranks(2)
@pytest.mark.parametrize("axis", ["pipeline", "pp"])
def test_each_stage_of_a_pipeline_shards_a_model_of_its_own(rank: int, axis: str):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=(axis, "data"))
    stage = nn.Linear(8 + rank, 4)  # no two stages are alike
    made = plan(stage, mesh=mesh)
    assert made.axes == (("shard", 1),)
    model = shard(stage, mesh=mesh, plan=made)
    model(torch.ones(2, 8 + rank)).sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [[2.0] * (8 + rank)] * 4


def test_two_ranks_on_one_gpu_are_refused():
    refuse_shared_cards(["node1 GPU a", "node1 GPU b", "node2 GPU a"])
    with pytest.raises(EnvironmentProblem, match=r"ranks \[0, 2\] are all on node1 GPU a"):
        refuse_shared_cards(["node1 GPU a", "node1 GPU b", "node1 GPU a"])


def test_device_of_a_rank_is_its_own_or_the_only_visible_one():
    assert _device_index(Launch(local_rank=1, local_world_size=2), 2) == 1
    assert _device_index(Launch(local_rank=3, local_world_size=4), 1) == 0
    with pytest.raises(EnvironmentProblem, match="local rank 2 has no device: 2 are visible"):
        _device_index(Launch(rank=2, local_rank=2, local_world_size=3, world_size=3), 2)


DRAWN = """4 ranks: shard 2 x context 2 (cpu)
  shard    0 2 | 1 3: shards of the same parameters, batches of their own
  context  0 1 | 2 3: parts of the same sequences"""


@ranks(4)
def test_a_mesh_draws_the_ranks_along_each_axis(rank: int):
    assert draw_mesh(make_mesh(MeshConfig(shard=2, context=2, device="cpu"))) == DRAWN
    names = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_shard", "dp_replicate", "cp"))
    assert draw_mesh(names).splitlines()[1:] == DRAWN.splitlines()[1:]


def test_ranks_that_do_not_exist_are_drawn():
    assert draw_mesh(MeshConfig(shard=2, context=2, device="cpu")) == DRAWN
    large = draw_mesh(MeshConfig(replicate=8, shard=8, device="cuda")).splitlines()
    assert large[1].startswith("  replicate  0 8 … 56 | 1 9 … 57 | 2 10 … 58 | 3 11 … 59 | … 8 groups: ")
    assert draw_mesh(MeshConfig(shard=1, device="cpu")) == "1 rank: shard 1 (cpu)"


@ranks(4)
def test_ranks_with_other_tokens_or_layers_draw_other_random_numbers(rank: int):
    """Those of a tensor group draw the same: they share layers."""
    for sizes in ({"context": 2}, {"pipeline": 2}, {"expert": 2}, {"replicate": 2}):
        streams = gather_objects(random_stream(make_mesh(MeshConfig(shard=2, device="cpu", **sizes))))
        assert sorted(streams) == [0, 1, 2, 3]
    assert gather_objects(random_stream(make_mesh(MeshConfig(shard=2, tensor=2, device="cpu")))) == [0, 0, 1, 1]


LEAVING = """
import atexit, sys
import torch, torch.distributed as dist
import shardwise as sw

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
store, row = dist.distributed_c10d._get_default_store(), torch.ones(2)
if rank == 0:
    sw.init_distributed()
    store.wait(["leaving"])
    dist.broadcast(row, 0)
    dist.destroy_process_group()
else:
    atexit.register(lambda: print("done" if work.is_completed() else "pending"))  # runs last
    sw.init_distributed()
    work = dist.broadcast(row, 0, async_op=True)
    atexit.register(lambda: store.set("leaving", ""))  # runs first
"""


def test_collectives_of_the_last_moment_end_before_the_interpreter_shuts_down(tmp_path: Path):
    """A gloo thread that ends one later aborts the process: `terminate called without an active exception`."""

    def leave(attempt: int) -> str:
        command = [sys.executable, "-c", LEAVING, str(tmp_path / str(attempt))]
        with subprocess.Popen([*command, "0"]) as other:
            printed = subprocess.run([*command, "1"], stdout=subprocess.PIPE, text=True, timeout=60).stdout
        return printed + str(other.returncode)

    # A busy machine may hold up the other rank for longer than the process waits.
    assert any(leave(attempt) == "done\n0" for attempt in range(3))


ENDING = """
import atexit, sys, time
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import shardwise as sw

times = []
atexit.register(lambda: print("waited" if time.monotonic() - times[0] > 0.1 else "left"))  # runs last
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
torch.manual_seed(0)
sw.shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
dist.destroy_process_group()
atexit.register(lambda: times.append(time.monotonic()))  # runs first
"""


def test_threads_of_a_destroyed_group_end_before_the_interpreter_shuts_down(tmp_path: Path):
    """They release tensors after their collective has returned."""
    command = [sys.executable, "-c", ENDING, str(tmp_path / "store")]
    with subprocess.Popen([*command, "0"], stdout=subprocess.DEVNULL):
        assert subprocess.check_output([*command, "1"], text=True, timeout=60) == "waited\n"
