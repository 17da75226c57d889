"""What is known of a sharded model: its plan and state, and how it recovers from an interrupted step."""

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
    """The ranks that hold the other stages of a model."""

    group: dist.ProcessGroup
    counted_elsewhere: frozenset[str]
    """Parameters that an earlier stage holds too: norms of all stages count them there."""
    elsewhere: frozenset[str]
    """Parameters and buffers of the whole model that only other ranks hold."""


@dataclass(slots=True)
class ShardedState:
    """The plan a model was sharded by, and where."""

    plan: Plan
    mesh: DeviceMesh
    """Of all ranks that share the model."""
    pipeline: PipelineRanks | None = None
    """Where the model is a stage of a pipeline."""


_ROOTS: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()  # in the order in which they were sharded
# In the module's own dict, not in a table here: the state refers to the model, and a table would keep both.
_ATTRIBUTE = "_shardwise_state"
_NOTES = "_shardwise_notes"  # functions that drop what we noted of a step that failed


def remember(model: nn.Module, state: ShardedState, *, is_root: bool = True) -> None:
    """Record what is known of a sharded model; modules of several roots are the root of none."""
    model.__dict__[_ATTRIBUTE] = state
    if is_root:
        _ROOTS[model] = None


def sharded_state(model: nn.Module) -> ShardedState | None:
    """What was recorded for `model`, or None when it is not a root that shardwise sharded."""
    return model.__dict__.get(_ATTRIBUTE)


def forget_parameters(model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Take parameters out of the groups and the plan of a sharded model; the caller takes them off their modules.

    Ranks:
        Local. Call it alike on every rank.
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
    """Parameters and buffers of the whole model that only other stages of a pipeline hold."""
    state = sharded_state(model)
    return state.pipeline.elsewhere if state is not None and state.pipeline is not None else frozenset()


def on_recover(model: nn.Module, forget: Callable[[], None]) -> None:
    """Call `forget` when a step of `model` failed and is given up; also for a model sharded by hand."""
    model.__dict__.setdefault(_NOTES, []).append(forget)


def sharded_roots() -> list[nn.Module]:
    """Every living root that shardwise sharded, in the order in which they were."""
    return list(_ROOTS)


def users_line(frames: Sequence[traceback.FrameSummary] | None = None) -> str:
    """The last line outside torch and shardwise, of the stack unless other frames are given."""
    frames = [
        frame
        for frame in (traceback.extract_stack() if frames is None else frames)
        if not any(part in frame.filename for part in ("/torch/", "/shardwise/", "/safetensors/"))
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def described(tensors: Iterable[torch.Tensor]) -> str:
    """A sharded tensor among `tensors`, by the name of the parameter whose memory it is, or by its shape."""
    tensor = next(each for each in tensors if isinstance(each, DTensor))
    memory = compat.storage_id(local_tensor(tensor))
    for model in sharded_roots():
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor) and compat.storage_id(local_tensor(parameter)) == memory:
                return f"the sharded parameter {name!r}"
    return f"a sharded tensor of shape {list(tensor.shape)}"


def recover(model: nn.Module) -> None:
    """Make a model usable again after an exception in the middle of a step.

    The step is lost as a whole: parameters are sharded again, what was in flight is waited for and dropped,
    and every gradient of the model is cleared, those of earlier micro-steps included. Parameters and
    optimizer state are as they were.

    Args:
        model: The root that `shard()` or the last `fully_shard` was applied to, or a module that holds such
            roots. On a model that is not sharded it clears the gradients.

    Raises:
        ShardError: `model` is only a part of a sharded model.

    Ranks:
        Local, but the step must have failed at the same place on every rank: a rank that still waits in a
        collective cannot be helped from here.
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
    nn.Module.zero_grad(model)  # whatever the class makes of it


def abandon_pass(root: nn.Module) -> None:
    """Reshard a root whose forward raised; gradients of earlier backward passes stay, as in one process."""
    compat.reset_iteration(root)
    for module in root.modules():
        for forget in module.__dict__.get(_NOTES, ()):
            forget()
