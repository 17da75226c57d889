"""plan(): read the model, refuse what cannot be sharded, draft the groups."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from shardwise.config.schema import MeshConfig, ShardConfig
from shardwise.distributed.mesh import mesh_axes
from shardwise.errors import PlanError
from shardwise.planning.calls import Calls
from shardwise.planning.draft import Draft
from shardwise.planning.plan import Plan
from shardwise.planning.settings import check_config
from shardwise.planning.source.facts import read_calls
from shardwise.planning.tracing import trace_calls


def refuse_sharded(model: nn.Module) -> None:
    """Raise when the model, a part of it, or a model around it has been sharded before.

    Raises:
        PlanError: With which module, and whether the order was top-down.
    """
    sharded = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if "" in sharded:
        raise PlanError(
            f"the model ({type(model).__name__}) is already sharded",
            why="sharding replaces every parameter; a second time there is nothing left to replace",
            fix="call shard() once, on the unsharded model",
        )
    if sharded:
        raise PlanError(
            f"{sharded[0]!r} is already sharded" + (f", and {len(sharded) - 1} more modules" if sharded[1:] else ""),
            where=sharded[0],
            why="shard() decides all groups of a model at once, children first",
            fix="pass the unsharded model and name the groups with block_patterns or block_classes",
        )
    spread = next((name for name, p in model.named_parameters() if isinstance(p, DTensor)), None)
    if spread is not None:
        raise PlanError(
            f"{spread!r} is a DTensor already, though its module is not a group",
            where=spread,
            why="a model around this one was sharded first: groups are made children first, never top-down",
            fix="shard the outermost model only; it makes groups of its parts",
        )


def refuse_uncallable(module: nn.Module) -> None:
    """Refuse a root that cannot be called at all."""
    if type(module).forward is nn.Module.forward and isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise PlanError(
            f"the model is a {type(module).__name__}, which has no forward",
            why="FSDP2 gathers parameters when a module is called, and a container is never called",
            fix="shard its elements, or put it into a module with a forward",
        )


def refuse_unsupported(model: nn.Module) -> None:
    """Raise for parameters that FSDP2 cannot shard and nothing here can make shardable.

    Raises:
        PlanError: A lazy module without shapes yet, or a layer that makes sparse gradients.
    """
    for name, module in model.named_modules():
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        if any(is_lazy(parameter) for parameter in own):
            raise PlanError(
                f"{name or 'the model'} ({type(module).__name__}) has parameters without a shape yet",
                where=name,
                why="a lazy module learns its shapes in its first forward, and a plan needs them",
                fix="run one batch through the model before sharding, or give the sizes to the constructor",
            )
        trained = any(parameter.requires_grad for parameter in own)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and trained:
            raise PlanError(
                f"{name or 'the model'} ({type(module).__name__}) makes sparse gradients",
                where=name,
                why="FSDP2 reduces gradients in one dense buffer",
                fix=f"build it with sparse=False, or freeze it: {name}.requires_grad_(False)",
            )


def find_calls(model: nn.Module, example_inputs: Any = None) -> Calls:
    """Find who calls what in `model`, without hints and without running its code on real data.

    Args:
        model: Any module, on any device; the meta device is enough.
        example_inputs: A tuple of positional arguments, a dict of keyword arguments, or the only argument.
            With it the forward is traced on fake tensors; what the trace saw of the forward then stands.

    Ranks:
        Local. The result is the same on every rank that holds the same model and code.
    """
    if example_inputs is None:
        return read_calls(model)
    traced = trace_calls(model, example_inputs)
    calls = read_calls(model, traced if traced.complete else None)
    return replace(calls, notes=(*calls.notes, *traced.notes))


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
    return Draft(model, config, axes, device, find_calls(model, example_inputs)).plan(capability)
