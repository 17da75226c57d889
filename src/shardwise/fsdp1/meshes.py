"""From FSDP1's process groups, tuples of them, meshes and strategies to the mesh that `fully_shard` takes."""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from shardwise.errors import ConfigError
from shardwise.launching import read_launch
from shardwise.planning.axes import data_parallel_sizes

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
_AXES = ("replicate", "shard")
# One mesh for all units of a model: each new one would make process groups of its own.
_MADE: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, DeviceMesh]] = weakref.WeakKeyDictionary()


def find_mesh(
    strategy: ShardingStrategy, process_group: Any, device_mesh: DeviceMesh | None, device_type: str
) -> DeviceMesh:
    """The mesh of a unit: `(shard)`, or `(replicate, shard)` for the hybrid strategies and NO_SHARD.

    Args:
        strategy: What FSDP1 was asked for.
        process_group: None, a group, or FSDP1's pair of the group that shards and the one that replicates.
        device_mesh: What FSDP1 takes instead of groups.
        device_type: Where the shards live.

    Raises:
        ConfigError: The strategy and the groups contradict each other.
        PlanError: An axis of tensor parallelism or its like has more than one rank.

    Ranks:
        Collective the first time a set of groups is seen.
    """
    _refuse_contradictions(strategy, process_group, device_mesh)
    if device_mesh is not None and device_mesh.mesh_dim_names is not None:
        data_parallel_sizes(device_mesh)
    world = dist.group.WORLD
    if world is None:
        raise ConfigError(
            "there is no process group yet",
            where="FullyShardedDataParallel(...)",
            why="parameters are sharded over the ranks of a process group",
            fix="torch.distributed.init_process_group(...) first, as FSDP1 needs it too",
        )
    made = _MADE.setdefault(world, {})
    key = (strategy, process_group, device_mesh, device_type)
    if key not in made:
        made[key] = _make(strategy, process_group, device_mesh, device_type)
    return made[key]


def _refuse_contradictions(strategy: ShardingStrategy, process_group: Any, device_mesh: DeviceMesh | None) -> None:
    where = "FullyShardedDataParallel(process_group=, device_mesh=)"
    if process_group is not None and device_mesh is not None:
        raise ConfigError("both are given", where=where, why="each names the ranks", fix="leave one of them out")
    if strategy not in HYBRID:
        return
    pair = isinstance(process_group, tuple) and len(process_group) == 2
    if process_group is not None and not pair:
        raise ConfigError(
            f"{strategy.name} is given one process group",
            where=where,
            why="it shards over one group and replicates over another",
            fix="process_group=(shard_group, replicate_group), or a device_mesh of two axes",
        )
    if device_mesh is not None and device_mesh.ndim != 2:
        raise ConfigError(
            f"{strategy.name} is given a mesh of {device_mesh.ndim} axis",
            where=where,
            why="it replicates over the first axis and shards over the second",
            fix=f'init_device_mesh("{device_mesh.device_type}", (num_copies, num_shards))',
        )


def _make(
    strategy: ShardingStrategy, process_group: Any, device_mesh: DeviceMesh | None, device_type: str
) -> DeviceMesh:
    if strategy is ShardingStrategy.NO_SHARD:
        return _replicated(process_group, device_mesh, device_type)
    if device_mesh is not None:
        return device_mesh if strategy not in HYBRID else _named(device_mesh)
    if strategy in HYBRID:
        return _pair(process_group, device_type) if process_group is not None else _by_machine(device_type)
    if process_group is None or process_group is dist.group.WORLD:
        return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    return DeviceMesh.from_group(process_group, device_type, mesh_dim_names=("shard",))


def _named(mesh: DeviceMesh) -> DeviceMesh:
    """FSDP1 took a mesh without names, FSDP2 tells the axes by theirs."""
    if mesh.mesh_dim_names is not None:
        return mesh
    groups = [mesh.get_group(axis) for axis in range(2)]
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=mesh.mesh, mesh_dim_names=_AXES)


def _replicated(process_group: Any, device_mesh: DeviceMesh | None, device_type: str) -> DeviceMesh:
    """As many copies as there are ranks: a replicate axis of all, a shard axis of one."""
    group = device_mesh.get_group(0) if device_mesh is not None else process_group
    if group is None or group is dist.group.WORLD:
        return init_device_mesh(device_type, (dist.get_world_size(), 1), mesh_dim_names=_AXES)
    alone: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc="mesh_shard")
    ranks = torch.tensor(dist.get_process_group_ranks(group), dtype=torch.int).view(-1, 1)
    return DeviceMesh.from_group([group, alone], device_type, mesh=ranks, mesh_dim_names=_AXES)


def _pair(groups: tuple[dist.ProcessGroup, dist.ProcessGroup], device_type: str) -> DeviceMesh:
    """FSDP1's (shard, replicate) pair, as rows of ranks that shard and columns that replicate."""
    shard, replicate = groups
    rows: list[list[int]] = [[] for _ in range(dist.get_world_size(replicate))]
    dist.all_gather_object(rows, dist.get_process_group_ranks(shard), group=replicate)
    mesh = torch.tensor(rows, dtype=torch.int)
    return DeviceMesh.from_group([replicate, shard], device_type, mesh=mesh, mesh_dim_names=_AXES)


def _by_machine(device_type: str) -> DeviceMesh:
    """Shard within a machine, replicate between machines: what FSDP1 does when nothing is said."""
    num_ranks = dist.get_world_size()
    num_local = read_launch().local_world_size if device_type == "cpu" else torch.accelerator.device_count()
    num_local = min(num_local, num_ranks)
    if num_ranks % num_local:
        raise ConfigError(
            f"{num_ranks} ranks are not a multiple of {num_local}, the ranks of this machine",
            where="FullyShardedDataParallel(sharding_strategy=HYBRID_SHARD)",
            why="every machine holds one copy, spread over its ranks",
            fix="start the same number of ranks on every machine, or pass device_mesh=",
        )
    return init_device_mesh(device_type, (num_ranks // num_local, num_local), mesh_dim_names=_AXES)
