"""Give a unit its values before it is sharded: from meta, by `param_init_fn`, by `reset_parameters`, from rank 0."""

from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ShardError
from shardwise.sharding.replicas import broadcast_from_first

_SYNCED = "_shardwise_synced"


def initialise_unit(
    module: nn.Module,
    device: torch.device,
    is_apart: Callable[[nn.Module], bool],
    ignored: set[nn.Parameter],
    param_init_fn: Callable[[nn.Module], None] | None,
) -> None:
    """Give what is on the meta device its values, as FSDP1 does: the whole unit, on every rank.

    Args:
        module: About to be sharded as one unit.
        device: Where its parameters go.
        is_apart: Whether a module below belongs to another unit, or is ignored.
        ignored: Parameters to leave alone.
        param_init_fn: Called with each module of the unit, outer ones first; else `reset_parameters` is.

    Raises:
        ShardError: A module on meta has no `reset_parameters`.

    Ranks:
        Local. Ranks draw the same values only if they stand at the same place of their random streams.
    """
    modules = _modules_of(module, is_apart)
    on_meta = any(
        tensor.is_meta
        for owner in modules
        for tensor in (*owner.parameters(recurse=False), *owner.buffers(recurse=False))
        if tensor not in ignored
    )
    if not on_meta:
        return
    ties = _find_ties(modules)
    if param_init_fn is not None:
        for owner in modules:
            param_init_fn(owner)
    else:
        with torch.no_grad():
            for owner in modules:
                if any(True for _ in (*owner.parameters(recurse=False), *owner.buffers(recurse=False))):
                    _reset(owner, device)
    for places in ties:  # `to_empty` makes a parameter for each name; ranks that were not on meta still have one
        (first, first_name), *others = places
        for owner, name in others:
            owner._parameters[name] = first._parameters[first_name]


def _find_ties(modules: list[nn.Module]) -> list[list[tuple[nn.Module, str]]]:
    """Where each parameter that has several names is registered."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in modules:
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((owner, name))
    return [found for found in places.values() if len(found) > 1]


def _reset(owner: nn.Module, device: torch.device) -> None:
    reset = getattr(owner, "reset_parameters", None)
    if not callable(reset):
        raise ShardError(
            f"{type(owner).__name__} is on the meta device and has no reset_parameters()",
            where="FullyShardedDataParallel(param_init_fn=None)",
            why="it gives a module on meta its values, unless param_init_fn does",
            fix=f"define {type(owner).__name__}.reset_parameters, or pass param_init_fn=",
        )
    owner.to_empty(device=device, recurse=False)
    reset()


def _modules_of(module: nn.Module, is_apart: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """The modules of a unit, breadth first: the order in which FSDP1 initialises them."""
    found, waiting, seen = [], deque([module]), {module}
    while waiting:
        owner = waiting.popleft()
        found.append(owner)
        for child in owner.children():
            if child not in seen and not is_apart(child):
                seen.add(child)
                waiting.append(child)
    return found


def sync_from_first_rank(
    module: nn.Module, parameters: Iterable[nn.Parameter], mesh: DeviceMesh, device: torch.device
) -> None:
    """`sync_module_states`: every rank gets the first rank's parameters of this unit, and its buffers.

    FSDP1 needs an accelerator for it; here the CPU serves too.

    Args:
        module: About to be sharded as one unit.
        parameters: Those of the unit.
        mesh: The first rank of each axis sends.
        device: Buffers and parameters are brought there first.

    Ranks:
        Collective over the mesh.
    """
    tensors: list[torch.Tensor] = []
    for buffer in module.buffers():
        if not getattr(buffer, _SYNCED, False):  # a nested unit may have sent it
            setattr(buffer, _SYNCED, True)
            tensors.append(buffer)
    tensors += parameters
    for tensor in tensors:
        if tensor.device != device:
            tensor.data = tensor.data.to(device)
        # Between the copies first: a copy's own first rank must hold the values before it hands them on.
        broadcast_from_first(tensor.data, mesh, range(mesh.ndim))
