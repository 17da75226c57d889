"""From FSDP1's named optimizer state to what `optimizer.load_state_dict` takes on sharded parameters."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.fsdp1.adopting import adopt
from shardwise.fsdp1.names import clean_name
from shardwise.fsdp1.state_dicts import laid_out
from shardwise.sharding.full_params import reshard
from shardwise.sharding.layout import local_tensor

StateDict = dict[str, Any]


def parameter_groups(
    model: nn.Module, optimizer: Optimizer | None, optim_input: Iterable[Any] | None
) -> list[list[nn.Parameter]]:
    """Parameters in the optimizer's order: its own, those it was given, or else all of the model's."""
    if optimizer is not None:
        adopt(optimizer)
        return [list(group["params"]) for group in optimizer.param_groups]
    reshard(model)
    given: list[Any] = list(model.parameters() if optim_input is None else optim_input)
    if given and isinstance(given[0], dict):
        return [list(group["params"]) for group in given]
    return [given]


def loadable(
    state_dict: StateDict | None, model: nn.Module, groups: list[list[nn.Parameter]], mesh: DeviceMesh | None
) -> StateDict:
    """State by parameter number, each tensor placed like its parameter.

    Args:
        state_dict: By names; whole tensors, or sharded ones.
        model: Gives parameters their names.
        groups: Parameters in the optimizer's order, group by group.
        mesh: Where given, only its first rank's `state_dict` counts, and is sent to the others.

    Ranks:
        Collective over `mesh` where it is given, else local unless a tensor is sharded over another mesh.
    """
    reshard(model)
    name_of = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    parameters = [parameter for group in groups for parameter in group]
    names = [name_of[parameter] for parameter in parameters]
    source = _sent(state_dict, dict(zip(names, parameters, strict=True)), mesh) if mesh is not None else state_dict
    if source is None or "state" not in source:
        raise ConfigError(
            "there is no optimizer state",
            where="optim_state_dict_to_load",
            why="it is a dictionary with the keys state and param_groups",
            fix="pass what optim_state_dict returned; with rank0_only=True rank 0 must have it",
        )
    number_of = {name: number for number, name in enumerate(names)}
    state = {}
    # In the model's order, the same on every rank: placing a tensor that is sharded over another mesh communicates.
    for parameter, name in name_of.items():
        if name in number_of and (values := source["state"].get(name)) is not None:
            state[number_of[name]] = {key: _placed(value, parameter) for key, value in values.items()}
    return {"state": state, "param_groups": _numbered_groups(source["param_groups"], groups, name_of)}


def _numbered_groups(
    saved: list[StateDict], groups: list[list[nn.Parameter]], name_of: dict[nn.Parameter, str]
) -> list[StateDict]:
    """The optimizer's own groups with the saved options of the group that held the same parameters."""
    home = {name: group for group in saved for name in group["params"]}
    numbered, start = [], 0
    for index, group in enumerate(groups):
        found = [home[name_of[parameter]] for parameter in group if name_of[parameter] in home]
        options = found[0] if found else saved[min(index, len(saved) - 1)]
        numbered.append(options | {"params": list(range(start, start + len(group)))})
        start += len(group)
    return numbered


def _placed(value: Any, parameter: nn.Parameter) -> Any:
    if not isinstance(value, torch.Tensor) or not isinstance(parameter, DTensor):
        return value.clone() if isinstance(value, torch.Tensor) else _from_sharded_tensor(value, parameter)
    if value.ndim == 0 and parameter.ndim > 0:
        return value.clone()  # a counter; the optimizer must not change the caller's
    return laid_out(value, parameter)


def _from_sharded_tensor(value: Any, parameter: nn.Parameter) -> Any:
    """This rank's part of torch's older ShardedTensor, which cuts along dim 0 as FSDP2 does."""
    if not hasattr(value, "local_shards") or not isinstance(parameter, DTensor):
        return value
    own = local_tensor(parameter)
    shards = value.local_shards()
    part = shards[0].tensor if shards else own.new_empty(own.shape)
    return laid_out(part.view(own.shape), parameter, is_local=True)


def _sent(state_dict: StateDict | None, parameters: dict[str, nn.Parameter], mesh: DeviceMesh) -> StateDict:
    """The first rank's state dict, each tensor cut to this rank's part as it arrives."""
    is_first = not any(mesh.get_coordinate() or ())
    outline = _broadcast(_outline(state_dict) if is_first and state_dict else None, mesh)
    if outline is None:
        return {}
    state: dict[str, StateDict] = {}
    for name, values in outline["state"].items():
        state[name] = {}
        for key, value in values.items():
            if isinstance(value, _Shape):
                whole = state_dict["state"][name][key] if is_first and state_dict else None
                value = _broadcast_tensor(whole, value, mesh)
                if name in parameters:
                    value = _placed(value, parameters[name])
            state[name][key] = value
    return {"state": state, "param_groups": outline["param_groups"]}


class _Shape:
    """Stands for a tensor until it arrives."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype


def _outline(state_dict: StateDict) -> StateDict:
    state = {
        name: {key: _Shape(value) if isinstance(value, torch.Tensor) else value for key, value in values.items()}
        for name, values in state_dict["state"].items()
    }
    return {"state": state, "param_groups": state_dict["param_groups"]}


def _broadcast(value: Any, mesh: DeviceMesh) -> Any:
    sent = [value]
    for axis in range(mesh.ndim):
        dist.broadcast_object_list(sent, group_src=0, group=mesh.get_group(axis))
    return sent[0]


def _broadcast_tensor(whole: torch.Tensor | None, shape: _Shape, mesh: DeviceMesh) -> torch.Tensor:
    device = mesh.device_type
    sent = torch.empty(shape.shape, dtype=shape.dtype, device=device) if whole is None else whole.to(device)
    sent = sent.contiguous()
    for axis in range(mesh.ndim):
        dist.broadcast(sent, group_src=0, group=mesh.get_group(axis))
    return sent
