"""What the checks look at: a model with its groups and names, found once."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise import compat
from shardwise.planning.plan import PlannedParameter
from shardwise.sharding.registry import sharded_state


@dataclass(frozen=True, slots=True)
class Subject:
    """A live model, and the optimizers that train it."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    parameters: dict[str, nn.Parameter]
    """As registered now."""
    groups: dict[str, Any]
    """FSDP2's groups by the module they stand for."""
    mesh: DeviceMesh | None
    """None when nothing is sharded."""
    planned: tuple[PlannedParameter, ...]
    """Empty for a model sharded by hand."""
    averaged: frozenset[str]
    """Parameters outside all groups whose gradients shardwise averages."""
    names: dict[int, str]
    """Identity of a parameter, sharded or gathered, to its name."""

    def name_of(self, parameter: nn.Parameter) -> str:
        """How the model calls it; empty when it does not know it."""
        return self.names.get(id(parameter), "")


def look_at(model: nn.Module, optimizers: tuple[Optimizer, ...]) -> Subject:
    """Find the groups and names of a model.

    Ranks:
        Local.
    """
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    modules = {module: name for name, module in model.named_modules()}
    groups = compat.named_groups(model)
    for group in groups.values():
        for fsdp_param, owner, leaf in compat.places_in_group(group):
            names.setdefault(id(fsdp_param.sharded_param), f"{modules[owner]}.{leaf}".lstrip("."))
    state = sharded_state(model)
    planned = tuple(state.plan.parameters) if state is not None else ()
    averaged = (
        frozenset(p.fqn for p in (*state.plan.ignored, *state.plan.replicated)) if state is not None else frozenset()
    )
    return Subject(model, optimizers, parameters, groups, _mesh(model, groups), planned, averaged, names)


def _mesh(model: nn.Module, groups: dict[str, Any]) -> DeviceMesh | None:
    state = sharded_state(model)
    if state is not None:
        return state.mesh
    for group in groups.values():
        for parameter in compat.sharded_parameters(group):
            if isinstance(parameter, DTensor):
                return parameter.device_mesh
    return None
