"""Sizes of a mesh: of one that exists, or of one a plan is made for in advance."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.config.schema import MeshConfig
from shardwise.errors import PlanError


def mesh_axes(mesh: DeviceMesh | MeshConfig | None) -> tuple[dict[str, int], str]:
    """Axis sizes and device type of a mesh, of a mesh yet to be, or of this process alone."""
    if isinstance(mesh, MeshConfig):
        num_ranks = (mesh.shard or 1) * mesh.replicate * mesh.tensor
        accelerator = torch.accelerator.current_accelerator()
        device = mesh.device if mesh.device != "auto" else (accelerator.type if accelerator else "cpu")
        return mesh.sizes(num_ranks), device
    if mesh is None:
        accelerator = torch.accelerator.current_accelerator()
        return {"shard": 1}, accelerator.type if accelerator else "cpu"
    if mesh.ndim > 1 and not mesh.mesh_dim_names:
        raise PlanError(
            f"the mesh has {mesh.ndim} axes without names",
            why="which axis shards and which replicates is told by name",
            fix='init_device_mesh(..., mesh_dim_names=("replicate", "shard")), or init_distributed(MeshConfig(...))',
        )
    names = mesh.mesh_dim_names or ("shard",)
    sizes = dict(zip(names, mesh.shape, strict=True))
    if "shard" not in sizes:  # a mesh of the user's own naming: (shard) or (replicate, shard), as fully_shard reads it
        if mesh.ndim > 2:
            raise PlanError(
                f"the mesh axes {names} do not say which one shards",
                why="only one- and two-axis meshes have a meaning without names",
                fix='name the axes "replicate", "shard" and "tensor"',
            )
        sizes = {"shard": mesh.shape[0]} if mesh.ndim == 1 else {"replicate": mesh.shape[0], "shard": mesh.shape[1]}
    return sizes, mesh.device_type
