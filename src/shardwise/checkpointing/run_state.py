"""A run's state as one `Stateful` for plain `torch.distributed.checkpoint`: names and optimizers done right.

For those who stay with `dcp.save` and `dcp.load`: `dcp.save({"app": RunState(model, optimizer)})`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.checkpointing.formats.values import decode_value
from shardwise.checkpointing.state.nested import LAYOUT, Path, flatten, put_together, unflatten
from shardwise.checkpointing.state.optimizer_state import LIVE_OPTIONS, NamedGroup
from shardwise.checkpointing.state.run import Run, Stateful, extra_states, model_path, optimizer_path
from shardwise.errors import CheckpointError


class RunState:
    """Models, optimizers and further objects under the names that a `Checkpointer` gives them.

    Gradients do not matter, and optimizers that were never stepped get their state when it is loaded.

    Args:
        model: The model, or several by name.
        optimizers: One, several, or several by name.
        **objects: Anything with `state_dict` and `load_state_dict`.

    Ranks:
        Local; what `dcp.save` and `dcp.load` do with it is collective.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizers: Optimizer | Iterable[Optimizer] | Mapping[str, Optimizer] = (),
        **objects: Stateful,
    ) -> None:
        self._run = Run(model, optimizers, objects)

    def state_dict(self) -> dict[str, Any]:
        """Nested dictionaries of the live tensors and of plain values.

        An optimizer without state shows the state it will have: zeros, for a load to fill. That is also what a
        save of it would store.
        """
        unborn = {key: optimizer for key, optimizer in self._run.optimizers.items() if not optimizer.state}
        for optimizer in unborn.values():
            _give_birth(optimizer)
        try:
            found = self._run.collect()
        finally:
            for optimizer in unborn.values():
                optimizer.state.clear()
        parts: dict[Path, Any] = {found.paths[leaf.name]: leaf.tensor for leaf in found.leaves}
        values = dict(found.values)
        for name in [name for name in values if name.endswith(f".{LAYOUT}")]:
            # DCP would turn keys into text and lose empty dictionaries: an object's values travel as one text.
            prefix = name.removesuffix(LAYOUT)
            own = {each: values.pop(each) for each in list(values) if each.startswith(prefix)}
            parts[found.paths[name]] = json.dumps(own)
        return put_together(parts | {found.paths[name]: decode_value(value) for name, value in values.items()})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `dcp.load` has put into the dictionary that `state_dict` gave it.

        Raises:
            CheckpointError: The optimizers do not have the parameters or the groups that are in it.
        """
        tensors = self._run.tensors()
        with torch.no_grad():
            for name, model in self._run.models.items():
                stored = _under(state_dict, model_path(name))
                for entry in tensors[name]:
                    if stored[entry.name] is not entry.tensor:
                        entry.tensor.copy_(stored[entry.name])
                for key, module in extra_states(model).items():
                    module.set_extra_state(_rebuilt(stored[key], (*model_path(name), key)))
            for key, groups in self._run.groups(tensors).items():
                _load_optimizer(self._run.optimizers[key], groups, _under(state_dict, optimizer_path(key)))
        for key, item in self._run.objects.items():
            item.load_state_dict(_rebuilt(state_dict[key], (key,)))


def _give_birth(optimizer: Optimizer) -> None:
    """Let the optimizer make its state, as zeros, without changing a parameter."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step()
        for state in optimizer.state.values():
            for tensor in flatten(dict(state), ("state",))[0].tensors.values():
                tensor.zero_()
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _load_optimizer(optimizer: Optimizer, groups: list[NamedGroup], stored: dict[str, Any]) -> None:
    states, listed = stored.get("state", {}), stored["param_groups"]
    for group in groups:
        options = next((each for each in listed if set(each["params"]) == set(group.names)), None)
        if options is None:
            raise CheckpointError(
                f"no stored group has the {len(group.names)} parameters of one of the optimizer's",
                where=", ".join(group.names[:3]),
                why="options belong to a group of parameters",
                fix="build the optimizer with the groups that it had when it was saved",
            )
        group.options.update({key: value for key, value in options.items() if key not in LIVE_OPTIONS})
        for name, parameter in zip(group.names, group.parameters, strict=True):
            if name in states:
                optimizer.state[parameter] = dict(states[name])


def _under(state: dict[str, Any], path: Path) -> dict[str, Any]:
    for key in path:
        state = state[key]  # pyrefly: ignore[bad-index]  # model and optimizer names are text
    return state


def _rebuilt(stored: Any, path: Path) -> Any:
    """An object's state in its own shape, from the dictionary that `put_together` made of it."""
    if not isinstance(stored, dict) or LAYOUT not in stored:
        return stored
    prefix = ".".join(map(str, path)) + "."
    values = json.loads(stored[LAYOUT])

    def find(name: str, is_tensor: bool) -> Any:
        return _leaf(stored, name.removeprefix(prefix)) if is_tensor else decode_value(values[name])

    return unflatten(values[prefix + LAYOUT], find)


def _leaf(nested: Any, name: str) -> Any:
    """What stands under a dotted name; keys may have dots themselves."""
    if not name:
        return nested
    if isinstance(nested, list):
        head, _, rest = name.partition(".")
        return _leaf(nested[int(head)], rest)
    for key in nested:
        if name == key or name.startswith(f"{key}."):
            try:
                return _leaf(nested[key], name[len(key) + 1 :])
            except (KeyError, IndexError, ValueError, TypeError):
                continue
    raise KeyError(name)
