"""Before anything is changed: the plan fits the model, and all ranks hold the same plan and the same weights."""

import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import PlanError, ShardwiseError
from shardwise.planning.dtypes import dtype_name
from shardwise.planning.plan import Plan
from shardwise.planning.refusals import refuse_sharded
from shardwise.ranks import agree_on, raise_together

_SAMPLES = 64
"""Elements compared of each parameter: enough to tell two random draws apart, cheap for any size."""


def plan_together(make: Callable[[], Plan], mesh: DeviceMesh) -> Plan:
    """Make the plan, or raise on every rank if it fails on one.

    Ranks:
        Collective.
    """
    plan, failure = None, None
    try:
        plan = make()
    except ShardwiseError as error:
        failure = error
    for group in _groups(mesh):
        raise_together(failure, group=group)
    if failure is not None or plan is None:
        raise failure or RuntimeError("no plan was made")
    return plan


def check_fits(plan: Plan, model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise unless `plan` was made for this model and mesh.

    Raises:
        PlanError: Already sharded, other parameters, or other mesh sizes.
    """
    refuse_sharded(model)
    sizes = tuple(mesh.shape)
    if tuple(size for _, size in plan.axes) != sizes and not (len(sizes) == 1 and plan.num_shards == sizes[0]):
        raise PlanError(
            f"the plan is for a mesh of {dict(plan.axes)}, this one has {sizes}",
            why="shard dimensions and policies were chosen for those sizes",
            fix="plan(model, config, mesh=mesh) with the mesh of this run",
        )
    planned = {name: parameter for parameter in plan.parameters for name in (parameter.fqn, *parameter.aliases)}
    present = dict(model.named_parameters(remove_duplicate=False))
    if odd := sorted(planned.keys() ^ present.keys()):
        raise PlanError(
            f"the plan and the model differ in {len(odd)} parameters, first {odd[0]!r}",
            where=odd[0],
            why="a plan is carried out as it is, parameter by parameter",
            fix="plan(model, ...) again for this model",
        )
    for name, parameter in present.items():
        stored = planned[name].upcast_from or planned[name].dtype
        if tuple(parameter.shape) != planned[name].shape or dtype_name(parameter.dtype) != stored:
            raise PlanError(
                f"{name!r} is {list(parameter.shape)} {dtype_name(parameter.dtype)}, planned as "
                f"{list(planned[name].shape)} {stored}",
                where=name,
                why="a plan is carried out as it is, parameter by parameter",
                fix="plan(model, ...) again for this model",
            )


def agree_on_plan(plan: Plan, mesh: DeviceMesh) -> None:
    """Raise on every rank, showing the difference, unless all ranks hold the same plan.

    Ranks:
        Collective.
    """
    for group in _groups(mesh):
        agree_on(plan.to_json(indent=1), "the sharding plan", group=group)


def agree_on_weights(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise on every rank unless all ranks hold the same weights, judged by a sample of each parameter.

    Each rank keeps its slice of its own copy, so ranks that were initialised differently would silently train a
    patchwork.

    Ranks:
        Collective.
    """
    lines = "\n".join(f"{name} {_fingerprint(parameter)}" for name, parameter in model.named_parameters())
    for group in _groups(mesh):
        agree_on(
            lines,
            "the model's weights",
            fix="seed every rank alike before building the model, build it on meta and call materialize(), or call "
            "materialize(model, sync_from_rank_zero=True) before sharding",
            group=group,
        )


def _fingerprint(parameter: nn.Parameter) -> str:
    if parameter.is_meta:
        return "meta"
    if type(parameter) is not nn.Parameter or parameter.numel() == 0:
        return "-"
    flat = parameter.detach().reshape(-1) if parameter.is_contiguous() else parameter.detach().contiguous().view(-1)
    sample = flat[:: max(flat.numel() // _SAMPLES, 1)][:_SAMPLES].cpu().contiguous()
    return f"{zlib.crc32(sample.view(torch.uint8).numpy().tobytes()):08x}"


def _groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Process groups that together reach every rank of the mesh; none when there is nobody to ask."""
    if mesh.size() == 1 or dist.get_backend() == "fake":
        return []
    return [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
