"""Records of sharded models: plan, mesh, and recovery from an interrupted step."""

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.errors import ShardError
from shardwise.planning.plan import Plan
from shardwise.sharding.inventory import local_tensor


@dataclass(frozen=True, slots=True)
class PipelineRanks:
    """Parameters that other stages of a pipeline have."""

    group: dist.ProcessGroup
    counted_elsewhere: frozenset[str]
    """Parameters that an earlier stage also has, and counts in norms over all stages."""
    elsewhere: frozenset[str]
    """Parameters and buffers of the full model that only other ranks have."""


@dataclass(slots=True)
class ShardedState:
    """Plan, mesh and pipeline of a sharded model."""

    plan: Plan
    mesh: DeviceMesh
    """Mesh of all ranks of the model."""
    pipeline: PipelineRanks | None = None
    """Set if the model is a pipeline stage."""


_ROOTS: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()  # in sharding order
# In the module's own dict, not in a global table: the state refers to the model, and a table would keep both alive.
_ATTRIBUTE = "_shardwise_state"
_NOTES = "_shardwise_notes"  # functions that drop the records of a failed step


def remember(model: nn.Module, state: ShardedState, *, is_root: bool = True) -> None:
    """Record the state of a sharded model; `is_root` is False for a module that contains several roots."""
    model.__dict__[_ATTRIBUTE] = state
    if is_root:
        _ROOTS[model] = None


def sharded_state(model: nn.Module) -> ShardedState | None:
    """Return the state of `model`, or None if it is not a root sharded by shardwise."""
    return model.__dict__.get(_ATTRIBUTE)


def forget_parameters(model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Remove parameters from the groups and the plan of a sharded model; the caller removes them from their modules.

    Ranks:
        Local. Call it identically on every rank.
    """
    forgotten = {id(parameter) for parameter in parameters}
    names = {name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in forgotten}
    for group in compat.param_groups(model):
        compat.drop_records(group, lambda record: id(compat.sharded_parameter(record)) in forgotten)
    if (state := sharded_state(model)) is not None:
        groups = [
            replace(group, parameters=tuple(each for each in group.parameters if each.fqn not in names))
            for group in state.plan.groups
        ]
        state.plan = replace(state.plan, groups=tuple(groups))


def names_elsewhere(model: nn.Module) -> frozenset[str]:
    """Return the parameters and buffers of the full model that only other pipeline stages have."""
    state = sharded_state(model)
    return state.pipeline.elsewhere if state is not None and state.pipeline is not None else frozenset()


def on_recover(model: nn.Module, forget: Callable[[], None]) -> None:
    """Call `forget` when a failed step of `model` is abandoned; also for a model sharded by hand."""
    model.__dict__.setdefault(_NOTES, []).append(forget)


def sharded_roots() -> list[nn.Module]:
    """Return all existing roots sharded by shardwise, in sharding order."""
    return list(_ROOTS)


def users_line(frames: Sequence[traceback.FrameSummary] | None = None) -> str:
    """Return the last line outside torch and shardwise, in these frames or the current stack."""
    frames = [
        frame
        for frame in (traceback.extract_stack() if frames is None else frames)
        if not any(part in frame.filename for part in ("/torch/", "/shardwise/", "/safetensors/"))
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def described(tensors: Iterable[torch.Tensor]) -> str:
    """Describe a sharded tensor of `tensors` by the parameter whose memory it uses, or by its shape."""
    tensor = next(each for each in tensors if isinstance(each, DTensor))
    memory = compat.storage_id(local_tensor(tensor))
    for model in sharded_roots():
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor) and compat.storage_id(local_tensor(parameter)) == memory:
                return f"the sharded parameter {name!r}"
    return f"a sharded tensor of shape {list(tensor.shape)}"


def recover(model: nn.Module) -> None:
    """Make a model usable again after an exception during a step.

    The whole step is lost: parameters are resharded, pending communication is completed and its results are dropped,
    and all gradients of the model are cleared, including those of earlier micro-steps. Parameters and
    optimizer state do not change.

    Args:
        model: The root that `shard()` or the last `fully_shard` was applied to, or a module that contains such
            roots. For an unsharded model only the gradients are cleared.

    Raises:
        ShardError: `model` is only a part of a sharded model.

    Ranks:
        Local, but the step must have failed at the same place on every rank: a rank that still waits in a
        collective is not released.
    """
    modules = compat.fsdp_modules(model)
    roots = [module for module in modules if compat.is_root(module) is not False]
    inside = {module for root in roots for module in root.modules()}
    for module in modules:
        if module not in inside:
            raise ShardError(
                "recover needs the root of a sharded model, and was given a submodule",
                where=type(model).__name__,
                why="the state of a failed step is shared by the whole model",
                fix="call recover(model) with the module whose call started the step",
            )
    for root in roots:
        abandon_pass(root)
    compat.clear_gradients(compat.param_groups(model), set(model.modules()), set_to_none=True)
    nn.Module.zero_grad(model)  # not an override of the class


def abandon_pass(root: nn.Module) -> None:
    """Reshard a root whose forward raised; keep gradients of earlier backward passes, as in one process."""
    compat.reset_iteration(root)
    for module in root.modules():
        for forget in module.__dict__.get(_NOTES, ()):
            forget()
