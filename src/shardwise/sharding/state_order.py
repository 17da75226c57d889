"""Torch's own functions for optimizer state, made to follow names where ranks list parameters in different orders.

`get_optimizer_state_dict(full_state_dict=True)` gathers tensors in the order of each rank's `optimizer.state_dict()`,
and `set_optimizer_state_dict(broadcast_from_rank0=True)` hands every rank the names in the first rank's order. With
groups built from Python sets both give parameters the moments of others, without an error.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.sharding.inventory import unwrapped_name
from shardwise.sharding.registry import sharded_roots

_FOLLOWING: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def follow_names(optimizer: Optimizer) -> None:
    """Let the state dicts of an optimizer of sharded parameters go by names; once is enough.

    Ranks:
        Local.
    """
    if optimizer not in _FOLLOWING:
        _FOLLOWING.add(optimizer)
        optimizer.register_state_dict_post_hook(_order_state)
        optimizer.register_load_state_dict_pre_hook(_order_names)


def _order_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state in the models' order, each parameter under the number that it has."""
    place = {id(parameter): index for index, (_, parameter) in enumerate(_named_parameters())}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def key(entry: Any) -> int:
        known = isinstance(entry, int) and entry < len(held)
        return place.get(id(held[entry]), len(place)) if known else len(place)

    state = state_dict["state"]
    return {**state_dict, "state": {entry: state[entry] for entry in sorted(state, key=key)}}


def _order_names(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Where groups list names instead of numbers: the same groups and names in this optimizer's order."""
    given = state_dict.get("param_groups", [])
    if not all(isinstance(name, str) for group in given for name in group["params"]):
        return None
    name_of = {id(parameter): name for name, parameter in _named_parameters()}
    live = [[name_of.get(id(parameter), "") for parameter in group["params"]] for group in optimizer.param_groups]
    groups = {frozenset(group["params"]): group for group in given}
    if len(groups) != len(given) or {frozenset(names) for names in live} != groups.keys():
        return None  # torch compares them, and says what does not fit
    return {**state_dict, "param_groups": [{**groups[frozenset(names)], "params": names} for names in live]}


def _named_parameters() -> list[tuple[str, torch.Tensor]]:
    """Every parameter of every sharded model, in the order in which the models were sharded."""
    return [
        (unwrapped_name(name), parameter)
        for root in sharded_roots()
        for name, parameter in nn.Module.named_parameters(root)
    ]
