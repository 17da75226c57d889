"""plan(): read a model and a config, decide everything, and write it down with reasons. Changes nothing."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.config.schema import MeshConfig, ShardConfig
from shardwise.planning.axes import mesh_axes
from shardwise.planning.draft import Draft
from shardwise.planning.dtypes import choose_compute
from shardwise.planning.entrypoints import find_calls
from shardwise.planning.plan import Plan
from shardwise.planning.refusals import refuse_sharded, refuse_uncallable, refuse_unsupported
from shardwise.planning.settings import check_config


def plan(
    model: nn.Module,
    config: ShardConfig | None = None,
    *,
    mesh: DeviceMesh | MeshConfig | None = None,
    example_inputs: Any = None,
) -> Plan:
    """Decide how `model` will be sharded and say why.

    Args:
        model: On the meta device or real; it is not changed.
        config: What to decide and how; the default decides everything.
        mesh: The mesh of the run, or a `MeshConfig` with its sizes to plan for ranks that do not exist yet.
        example_inputs: A tuple of positional or a dict of keyword arguments of `forward`; when given, real calls are
            observed on fake tensors instead of read from source.

    Returns:
        The plan, equal on every rank for the same model, config and mesh.

    Raises:
        PlanError: The model cannot be sharded as asked.

    Ranks:
        Local. No communication.
    """
    return make_plan(model, config or ShardConfig(), mesh, example_inputs, capability=device_capability())


def device_capability() -> tuple[int, int] | None:
    """CUDA compute capability of this machine, None without a GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def make_plan(
    model: nn.Module,
    config: ShardConfig,
    mesh: DeviceMesh | MeshConfig | None,
    example_inputs: Any,
    *,
    capability: tuple[int, int] | None,
) -> Plan:
    """`plan()` with the hardware's capability given."""
    refuse_sharded(model)
    refuse_uncallable(model)
    refuse_unsupported(model)
    axes, device = mesh_axes(mesh)
    check_config(config, axes)
    draft = Draft(model, config, axes, device)
    calls = find_calls(model, example_inputs)
    units = draft.units(calls)
    assignment = draft.assignment(units, calls)
    compute = choose_compute(config.precision, device, capability, draft.storage_dtypes())
    groups = draft.groups(assignment, calls, compute)
    return draft.plan(groups, calls, compute)
