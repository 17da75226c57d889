"""Writes to parameters of a sharded model, in any state of the parameter."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.errors import ShardError
from shardwise.sharding.inventory import full_tensor, local_part, local_tensor

_MARK = "_shardwise_sharded"
_VERSION = "_shardwise_version"
"""Attribute of an unsharded parameter: its version at unsharding, or -1 if its `.data` was accessed since."""


class ShardUses:
    """Number of uses of shards while a group may be unsharded, which may have been writes."""

    count = 0


def watch_writes(model: nn.Module) -> None:
    """Preserve writes to the model's parameters, sharded or unsharded; idempotent.

    FSDP2 frees an unsharded parameter with all values written by forward, such as a clamped logit scale; writes are
    copied to the shard first. `parameter.data = value` copies the values: torch would only change the wrapper of a
    DTensor, and the group would still all-gather the old values.
    """
    _watch_data()
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            parameter.__dict__[_MARK] = True
    for group in compat.param_groups(model):
        if _MARK not in vars(group):
            vars(group)[_MARK] = True
            compat.around_unsharded(group, _refuse_replaced, _note_versions, write_back)
            compat.before_reset(group, _check_adopted)


def is_watched(parameter: torch.Tensor) -> bool:
    """Whether a tensor is a sharded parameter of a model sharded by shardwise."""
    return _MARK in parameter.__dict__


def is_of_group(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a sharded or unsharded parameter of a group created by shardwise."""
    return _MARK in tensor.__dict__ or _VERSION in tensor.__dict__


@functools.cache
def _watch_data() -> None:
    compat.watch_data(DTensor, _hand_out_shard, _assign_sharded)
    compat.watch_data(nn.Parameter, _hand_out, _assign_unsharded)


def _refuse_replaced(group: Any) -> None:
    """Raise if a module's parameter was replaced or removed after sharding, which FSDP2 would ignore."""
    for record in compat.parameter_records([group]):
        for module, name in compat.places_of(record):
            if module._parameters.get(name) is not compat.sharded_parameter(record):
                raise _not_the_sharded_one(module, name)


def _check_adopted(record: Any) -> None:
    """Raise if the registered tensor cannot be FSDP2's shard; `model.double()` replaces the parameter's dict."""
    module, name = compat.places_of(record)[0]
    registered, shard = module._parameters.get(name), compat.sharded_parameter(record)
    if not isinstance(registered, DTensor) or registered.shape != shard.shape:
        raise _not_the_sharded_one(module, name)
    registered.__dict__[_MARK] = True


def _not_the_sharded_one(module: nn.Module, name: str) -> ShardError:
    return ShardError(
        f"{name!r} of a sharded {type(module).__name__} is not the parameter that was sharded",
        where=f"{type(module).__name__}.{name}",
        why="the group all-gathers its original shard; the assignment would be silently ignored",
        fix="tie, replace or parametrize before sharding; to change values, parameter.copy_(...) under no_grad",
    )


def _note_versions(group: Any) -> None:
    for parameter in compat.unsharded_parameters(group):
        if not parameter.is_inference():
            parameter.__dict__[_VERSION] = parameter._version


def write_back(group: Any) -> None:
    """Copy writes to unsharded parameters to the shards, before the unsharded parameters are freed or replaced."""
    is_written = False
    for parameter, sharded in zip(compat.unsharded_parameters(group), compat.sharded_parameters(group), strict=True):
        if parameter.__dict__.get(_VERSION, 0) != (0 if parameter.is_inference() else parameter._version):
            _copy_changes(parameter, sharded)
            is_written = True
    if is_written:
        compat.wait_before_unshard(group)
        _note_versions(group)


@torch.no_grad()
def _copy_changes(parameter: nn.Parameter, sharded: nn.Parameter) -> None:
    """Copy only changed values: the others may have been rounded to the compute dtype."""
    if compat.extension_of(sharded) is not None:
        parameter.__dict__[_VERSION] = parameter._version  # raise only once, so that the group can be resharded
        raise ShardError(
            f"a parameter of shape {list(parameter.shape)} was written to while it was unsharded",
            where=type(local_tensor(sharded)).__name__,
            why="its tensor subclass gathers it in another form than it is stored in: the shard cannot take what was "
            "written",
            fix="write to the sharded parameter, between a backward and the next forward",
        )
    local = local_tensor(sharded)
    own = local_part(local_tensor(parameter), sharded).to(local.device)
    local.copy_(torch.where(own == local.to(own.dtype), local, own.to(local.dtype)))


_HANDED_OUT: dict[int, dict[int, weakref.ref[Any]]] = {}
"""Tensors returned by `.data` of a shard, by address of the shard and by identity. A weak reference to the parameter
itself would prevent torch from swapping it (`model.to(device)`)."""


def _hand_out_shard(parameter: DTensor, data: torch.Tensor) -> None:
    ShardUses.count += 1
    if is_watched(parameter):
        living, key = _HANDED_OUT.setdefault(local_tensor(parameter).data_ptr(), {}), id(data)
        living[key] = weakref.ref(data, lambda _: living.pop(key, None))


def _hand_out(parameter: nn.Parameter, _: torch.Tensor) -> None:
    if _VERSION in parameter.__dict__:
        parameter.__dict__[_VERSION] = -1  # writes through `.data` do not change the version


def _assign_unsharded(parameter: nn.Parameter, value: torch.Tensor) -> bool:
    """Copy the values in place; return False for other parameters, which torch handles."""
    if _VERSION not in parameter.__dict__:
        return False
    _refuse_other_kind(parameter, value)
    with torch.no_grad():
        parameter.copy_(value)
    return True


def _assign_sharded(tensor: DTensor, value: torch.Tensor) -> bool:
    """Copy the values in place; return False for other tensors, which torch handles.

    Ranks:
        Collective if the value has other placements.
    """
    ShardUses.count += 1
    if is_watched(tensor):
        _refuse_other_kind(tensor, value)
    elif isinstance(tensor, nn.Parameter):
        return False  # of a model sharded by hand
    elif value.shape != tensor.shape or value.dtype != tensor.dtype or any(p.is_partial() for p in tensor.placements):
        return False
    local = local_tensor(tensor)
    if isinstance(value, DTensor) and value.placements != tensor.placements:
        value = full_tensor(value)
    own = local_tensor(value) if isinstance(value, DTensor) else local_part(value, tensor)
    if not local.is_meta and own.data_ptr() != local.data_ptr():
        for data in [reference() for reference in _HANDED_OUT.pop(local.data_ptr(), {}).values()]:
            if data is not None and local_tensor(data).data_ptr() == local.data_ptr():
                compat.copy_memory(data)  # two tensors may be exchanging their `.data`
        with torch.no_grad():
            local.copy_(own)
    return True


def _refuse_other_kind(parameter: torch.Tensor, value: torch.Tensor) -> None:
    if value.shape != parameter.shape or value.dtype != parameter.dtype:
        raise ShardError(
            f"`.data` of a sharded parameter, {list(parameter.shape)} {parameter.dtype}, was assigned "
            f"{list(value.shape)} {value.dtype}",
            where="parameter.data = ...",
            why="the group all-gathers its original shard; torch would ignore the assignment",
            fix="change shape or dtype before sharding; ShardConfig.precision sets the dtype of computation",
        )


class LocalValue(torch.autograd.Function):
    """Local tensor of a replicated DTensor that allows in-place writes, unlike the view of `to_local`."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> torch.Tensor:
        """Return an alias of the local tensor that is not a view for autograd."""
        ctx.layout = parameter.device_mesh, parameter.placements
        return local_tensor(parameter).data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient with the placements of the parameter."""
        return DTensor.from_local(gradients[0], *ctx.layout, run_check=False)


def keep_assigned(shown: torch.Tensor, parameter: DTensor) -> None:
    """Copy values assigned by `shown.data = value` back to the parameter."""
    local = local_tensor(parameter)
    if shown.data_ptr() != local.data_ptr():
        with torch.no_grad():
            local.copy_(shown)
