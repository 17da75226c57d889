"""What a manifest says about a run besides its tensors: step, meshes, plans, how names fit together."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.checkpointing.saving.sharing import PER_RANK
from shardwise.checkpointing.sharded.manifest import Header
from shardwise.checkpointing.sharded.writing import FileRecord
from shardwise.checkpointing.state.nested import Path
from shardwise.checkpointing.state.run import Collected, Run
from shardwise.checkpointing.state.slices import dtype_name
from shardwise.planning.plan import Plan
from shardwise.planning.plan_json import encode_plan
from shardwise.sharding.registry import sharded_state


def describe_run(run: Run) -> dict[str, Any]:
    """Meshes, plans and dtypes of the models, as JSON.

    Ranks:
        Local; the same on every rank.
    """
    described: dict[str, Any] = {}
    for name, model in run.models.items():
        state = sharded_state(model)
        mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
        described[name] = {
            "class": type(model).__qualname__,
            "dtypes": sorted(map(dtype_name, {p.dtype for p in model.parameters()})),
            "mesh": None if mesh is None else _axes(mesh),
            "plan": None if state is None else _encoded(state.plan),
        }
    return {"models": described}


def make_header(
    step: int,
    world_size: int,
    records: Iterable[FileRecord],
    values: dict[str, Any],
    collected: Collected,
) -> Header:
    """The head of a manifest.

    Args:
        step: Of the run.
        world_size: Ranks that saved.
        records: What each of them wrote.
        values: Everything that is no tensor, encoded.
        collected: Rank 0's state, which knows how names came about.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    names = {tensor.name for record in records for tensor in record.tensors} | {*values, *collected.aliases}
    return Header(
        step=step,
        world_size=world_size,
        values=values,
        aliases=collected.aliases,
        structure={name: _path(name, collected.paths) for name in sorted(names)},
        details={**collected.details, "torch": str(torch.__version__), "date": now},
    )


@lru_cache(maxsize=8)
def _encoded(plan: Plan) -> dict[str, Any]:
    # Training waits for it at every save, and a plan has a line for each parameter.
    return json.loads(encode_plan(plan))


def _path(name: str, paths: Mapping[str, Path]) -> Path:
    if name in paths:
        return paths[name]
    if name.startswith(f"{PER_RANK}."):
        _, rank, rest = name.split(".", 2)
        return (PER_RANK, rank, *paths.get(rest, (rest,)))
    return tuple(name.split("."))  # other ranks' random numbers


def _axes(mesh: Any) -> dict[str, int]:
    names = mesh.mesh_dim_names or tuple(f"axis {axis}" for axis in range(mesh.ndim))
    return {name: mesh.size(axis) for axis, name in enumerate(names)}
