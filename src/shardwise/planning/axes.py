"""Sizes of a mesh: of one that exists, or of one a plan is made for in advance."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.config.schema import MODEL_PARALLEL_AXES, PIPELINE_AXES, MeshConfig, refuse_model_parallel
from shardwise.errors import PlanError


def mesh_axes(mesh: DeviceMesh | MeshConfig | None) -> tuple[dict[str, int], str]:
    """Axis sizes and device type of a mesh, of a mesh yet to be, or of this process alone."""
    if isinstance(mesh, MeshConfig):
        accelerator = torch.accelerator.current_accelerator()
        device = mesh.device if mesh.device != "auto" else (accelerator.type if accelerator else "cpu")
        return mesh.sizes((mesh.shard or 1) * mesh.replicate), device
    if mesh is None:
        accelerator = torch.accelerator.current_accelerator()
        return {"shard": 1}, accelerator.type if accelerator else "cpu"
    if mesh.ndim > 1 and not mesh.mesh_dim_names:
        raise PlanError(
            f"the mesh has {mesh.ndim} axes without names",
            why="which axis shards and which replicates is told by name",
            fix='init_device_mesh(..., mesh_dim_names=("replicate", "shard")), or init_distributed(MeshConfig(...))',
        )
    sizes = data_parallel_sizes(mesh)
    if "shard" not in sizes:  # a mesh of the user's own naming: (shard) or (replicate, shard), as fully_shard reads it
        if not 1 <= len(sizes) <= 2:
            raise PlanError(
                f"the mesh axes {mesh.mesh_dim_names} do not say which one shards",
                why="only one- and two-axis meshes have a meaning without names",
                fix='name the axes "replicate" and "shard"',
            )
        sizes = dict(zip(("replicate", "shard")[-len(sizes) :], sizes.values(), strict=True))
    return sizes, mesh.device_type


def data_parallel_sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Name and size of each axis that shards or replicates; one without a name is `shard`.

    Raises:
        PlanError: An axis of tensor parallelism or its like has more than one rank.

    Ranks:
        Local. A mesh has the same axes on every rank.
    """
    names = mesh.mesh_dim_names or ("shard",)
    sizes = dict(zip(names, mesh.shape, strict=True))
    fix = 'give these ranks to "shard" or "replicate": init_distributed(MeshConfig(shard=..., replicate=...))'
    refuse_model_parallel(sizes, where=f"mesh axes {', '.join(names)}", fix=fix)
    return {name: size for name, size in sizes.items() if name not in MODEL_PARALLEL_AXES | PIPELINE_AXES}
