"""FSDP1's optimizer state dicts: state under parameter names, whole or sharded."""

import hashlib
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OptimStateKeyType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.errors import ConfigError, ShardError
from shardwise.fsdp1.adopting import adopt
from shardwise.fsdp1.names import clean_name
from shardwise.fsdp1.state_dicts import copy_sharded
from shardwise.fsdp1.units import first_unit
from shardwise.sharding.full_params import reshard
from shardwise.sharding.gathering import gather_in_buckets, in_first_rank_order
from shardwise.sharding.replicas import values_of_ranks

StateDict = dict[str, Any]
_BUCKET_BYTES = 256 * 1024**2


def named_state(
    model: nn.Module,
    optimizer: Optimizer,
    state_dict: StateDict | None,
    *,
    is_full: bool,
    keep: bool,
    to_cpu: bool,
) -> StateDict:
    """The optimizer's state dict with names for numbers, as FSDP1 returns it.

    Groups and their parameters stand in the optimizer's order, as FSDP1 has them; where ranks have different orders, in
    the first rank's: `torch.distributed.checkpoint` takes a group's options and names from any rank.

    Args:
        model: Holds the optimizer's parameters.
        optimizer: Built on them, before or after they were wrapped.
        state_dict: From `optimizer.state_dict()`; read here when absent.
        is_full: Gather whole tensors; else they stay sharded.
        keep: False takes part and returns an empty dict.
        to_cpu: Put tensors into CPU memory.

    Ranks:
        Collective.
    """
    adopt(optimizer)
    reshard(model)
    given = optimizer.state_dict() if state_dict is None else state_dict
    names = _numbered_names(model, optimizer.param_groups)
    place = {clean_name(name): index for index, (name, _) in enumerate(model.named_parameters())}
    state = {names[key] if isinstance(key, int) else key: value for key, value in given["state"].items()}
    state = {name: state[name] for name in sorted(state, key=lambda name: place.get(name, len(place)))}
    mesh = first_unit(model, "optim_state_dict").mesh
    groups = [
        group | {"params": [names[key] if isinstance(key, int) else key for key in group["params"]]}
        for group in given["param_groups"]
    ]
    groups = _in_first_rank_order(groups, mesh)
    copied = _whole(state, mesh, keep, to_cpu) if is_full else _copied(state, to_cpu)
    return {"state": copied, "param_groups": groups} if keep else {}


def _in_first_rank_order(groups: list[StateDict], mesh: DeviceMesh) -> list[StateDict]:
    """The same groups as the first rank lists them; as they are where they are not the same."""
    listed = [tuple(group["params"]) for group in groups]
    digest = hashlib.blake2b(repr(listed).encode()).digest()
    if all(other == digest for other in values_of_ranks(digest, mesh)):  # on every rank, or on none
        return groups
    first = values_of_ranks(listed, mesh)[0]
    by_names = {frozenset(group["params"]): group for group in groups}
    if by_names.keys() != {frozenset(names) for names in first} or len(first) != len(groups):
        return groups
    return [by_names[frozenset(names)] | {"params": list(names)} for names in first]


def _numbered_names(model: nn.Module, groups: Iterable[StateDict]) -> list[str]:
    """Names of the optimizer's parameters, in the order in which its state dict numbers them."""
    name_of = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    held = [parameter for group in groups for parameter in group["params"]]
    foreign = [parameter for parameter in held if parameter not in name_of]
    if foreign:
        raise ShardError(
            f"{len(foreign)} of the optimizer's {len(held)} parameters are not the model's",
            where="optim_state_dict",
            why="state is saved under the names that parameters have in the model",
            fix="pass the model and the optimizer that belong together",
        )
    return [name_of[parameter] for parameter in held]


def _copied(state: dict[str, StateDict], to_cpu: bool) -> dict[str, StateDict]:
    return {
        name: {key: copy_sharded(value, to_cpu=to_cpu) for key, value in values.items()}
        for name, values in state.items()
    }


def _whole(state: dict[str, StateDict], mesh: DeviceMesh, keep: bool, to_cpu: bool) -> dict[str, StateDict]:
    sharded = {
        f"{name}.{key}": (name, key)
        for name, values in state.items()
        for key, value in values.items()
        if isinstance(value, DTensor)
    }
    tensors = in_first_rank_order([(full, state[name][key]) for full, (name, key) in sharded.items()], mesh)
    whole = {
        name: {
            key: copy_sharded(value, to_cpu=to_cpu) if keep and not isinstance(value, DTensor) else None
            for key, value in values.items()
        }
        for name, values in state.items()
    }
    for full, value in gather_in_buckets(tensors, bucket_bytes=_BUCKET_BYTES, keep=keep):
        name, key = sharded[full]
        if value is not None:
            whole[name][key] = value.cpu() if to_cpu else value
    return whole


def rekeyed(
    state_dict: StateDict, kind: OptimStateKeyType, model: nn.Module, groups: list[list[nn.Parameter]]
) -> StateDict:
    """The same optimizer state under names instead of numbers, or numbers instead of names.

    Args:
        state_dict: From a wrapped model (names) or a plain one (numbers).
        kind: What the keys shall be.
        model: Gives parameters their names.
        groups: Parameters in the optimizer's order, group by group.

    Raises:
        ConfigError: The keys are of both kinds.

    Ranks:
        Local.
    """
    kinds = {type(key) for key in state_dict["state"]}
    if len(kinds) > 1:
        raise ConfigError(
            f"the keys of the state are of several kinds: {sorted(kind.__name__ for kind in kinds)}",
            where="rekey_optim_state_dict",
            why="each is either a parameter's name or its number",
            fix="pass the dictionary as it was saved",
        )
    wanted = str if kind is OptimStateKeyType.PARAM_NAME else int
    if kinds == {wanted}:
        return state_dict
    names = _numbered_names(model, [{"params": group} for group in groups])
    new: dict[Any, Any] = dict(enumerate(names)) if wanted is str else {name: n for n, name in enumerate(names)}
    return {
        "state": {new[key]: value for key, value in state_dict["state"].items()},
        "param_groups": [
            group | {"params": sorted(new[key] for key in group["params"])} for group in state_dict["param_groups"]
        ],
    }
