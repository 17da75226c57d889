"""Meshes that `fully_shard` is given, however they are made: those it refuses are found, the others left alone."""

from __future__ import annotations

import pytest

from shardwise.linting.files import LintSettings
from shardwise.linting.lint import lint_text

PROGRAM = """
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

def main(model, ranks, sizes):
    torch.distributed.init_process_group("nccl")
    mesh = {mesh}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh{more})
    fully_shard(model, mesh=mesh{more})
    return model
"""
UNNAMED = "the 2-D mesh has no mesh_dim_names, so fully_shard refuses it"
NAMED = 'init_device_mesh("cuda", (2, 4), mesh_dim_names=("%s", "%s"))'
FLAT = "the flattened mesh has one axis: parameters are sharded over all ranks, nothing is replicated"


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ('init_device_mesh("cuda", (8,))', ""),
        ('init_device_mesh("cuda", sizes)', ""),
        ('init_device_mesh("cuda", (2, 4))', UNNAMED),
        ('init_device_mesh("cuda", mesh_shape=(2, 4))', UNNAMED),
        ('init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))', ""),
        ('init_device_mesh("cuda", (2, 4), ("replicate", "shard"))', ""),
        ('init_device_mesh("cuda", (2, 2, 2))', "the mesh has 3 axes; fully_shard takes one or two"),
        ('DeviceMesh("cuda", ranks)', ""),
        ('DeviceMesh("cuda", [0, 1, 2, 3])', ""),
        ('DeviceMesh("cuda", [[0, 1], [2, 3]])', UNNAMED),
        ('DeviceMesh("cuda", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))', ""),
        ('DeviceMesh("cuda", torch.arange(8).view(2, 4))', UNNAMED),
        ('DeviceMesh("cuda", torch.arange(8).reshape((2, 4)))', UNNAMED),
        ('DeviceMesh("cuda", torch.arange(8).view(2, 2, 2))', "the mesh has 3 axes; fully_shard takes one or two"),
        ('DeviceMesh("cuda", torch.arange(8).view(8))', ""),
        ('DeviceMesh("cuda", torch.arange(8))', ""),
        (f'{NAMED % ("replicate", "shard")}["replicate", "shard"]._flatten()', FLAT),
        (f'{NAMED % ("dp", "cp")}["dp", "cp"]._flatten("all")', ""),
    ],
)  # fmt: skip
def test_meshes(mesh: str, message: str):
    found = lint_text(PROGRAM.format(mesh=mesh, more=""), "train.py", LintSettings()).findings
    said = [each.message.rpartition(" (line ")[0] for each in found if each.code == "SW219"]
    assert set(said) == ({message} if message else set())
    named = PROGRAM.format(mesh=mesh, more=', dp_mesh_dims=("a",)')
    if message and message != FLAT:  # which axes shard is said in another way
        assert not [each for each in lint_text(named, "train.py", LintSettings()).findings if each.code == "SW219"]
