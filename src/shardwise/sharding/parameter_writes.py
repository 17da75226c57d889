"""Writes to parameters of a sharded model mean what they say, in whatever state the parameter is."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.errors import ShardError
from shardwise.sharding.inventory import local_part, local_tensor
from shardwise.sharding.repointing import watch_optimizers

_MARK = "_shardwise_sharded"
_VERSION = "_shardwise_version"
"""On an unsharded parameter: its version when it was unsharded; -1: its `.data` was handed out since."""


def watch_writes(model: nn.Module) -> None:
    """Keep what is written to the model's parameters, sharded or unsharded; repeatable.

    FSDP2 frees an unsharded parameter and all that forward wrote into it (a logit scale that is clamped, a teacher that
    is moved); each write is copied into the shard first. `parameter.data = value` copies the values: torch would
    change the wrapper of a DTensor only, and the group would gather the old values into other memory. So does
    `module.weight = nn.Parameter(...)`: FSDP2 would register its own parameter again.
    """
    _watch_data()
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            parameter.__dict__[_MARK] = True
    for group in compat.param_groups(model):
        if _MARK not in vars(group):
            vars(group)[_MARK] = True
            compat.around_unsharded(group, _note_versions, _write_back)
            compat.before_gather(group, _keep_replaced)


def is_watched(parameter: torch.Tensor) -> bool:
    """Whether a parameter is a sharded one of a model that shardwise or its FSDP1 has sharded."""
    return _MARK in parameter.__dict__


def _keep_replaced(record: Any, may_adopt: bool) -> None:
    """Copy the values of a parameter that replaced the shard on its modules, and register the shard again."""
    shard, places = compat.sharded_parameter(record), compat.places_of(record)
    found = [module._parameters.get(name) for module, name in places]
    new = next((parameter for parameter in found if parameter is not shard), None)
    registered = shard if new is None else new
    if may_adopt and isinstance(registered, DTensor):
        registered.__dict__[_MARK] = True  # `model.double()` gives a parameter another dict
        return
    if new is None:
        return
    module, name = places[0]
    where = f"{type(module).__name__}.{name} = ..."
    if any(parameter is not new for parameter in found):
        raise ShardError(
            "a tied parameter was replaced in one of its places",
            where=where,
            why="its group keeps one shard for all of them",
            fix=f"assign the same parameter in all {len(places)} places, or untie them before sharding",
        )
    _refuse_other_kind(shard, new, where)
    _copy_into_shard(shard, new, where)
    shard.requires_grad_(new.requires_grad)
    for module, name in places:
        module._parameters[name] = shard
    watch_optimizers(module, {new: shard})


@functools.cache
def _watch_data() -> None:
    compat.watch_data(DTensor, lambda tensor: None, _assign_sharded)
    compat.watch_data(nn.Parameter, _hand_out, _assign_unsharded)


def _note_versions(group: Any) -> None:
    for parameter in compat.unsharded_parameters(group):
        if not parameter.is_inference():
            parameter.__dict__[_VERSION] = parameter._version


def _write_back(group: Any) -> None:
    """Copy what was written into unsharded parameters to the shards, before the former are freed."""
    is_written = False
    for parameter, sharded in zip(compat.unsharded_parameters(group), compat.sharded_parameters(group), strict=True):
        if parameter.__dict__.get(_VERSION, 0) != (0 if parameter.is_inference() else parameter._version):
            _copy_changes(parameter, sharded)
            is_written = True
    if is_written:
        compat.wait_before_unshard(group)


@torch.no_grad()
def _copy_changes(parameter: nn.Parameter, sharded: nn.Parameter) -> None:
    """Only values that differ: the others were perhaps rounded to the dtype of computation."""
    local = local_tensor(sharded)
    own = local_part(local_tensor(parameter), sharded).to(local.device)
    local.copy_(torch.where(own == local.to(own.dtype), local, own.to(local.dtype)))


def _hand_out(parameter: nn.Parameter) -> None:
    if _VERSION in parameter.__dict__:
        parameter.__dict__[_VERSION] = -1  # a write through `.data` leaves no trace


def _assign_unsharded(parameter: nn.Parameter, value: torch.Tensor) -> bool:
    """Copy the values in place; False leaves a parameter that is not ours to torch."""
    if _VERSION not in parameter.__dict__:
        return False
    _refuse_other_kind(parameter, value, "parameter.data = ...")
    with torch.no_grad():
        parameter.copy_(value)
    return True


def _assign_sharded(tensor: DTensor, value: torch.Tensor) -> bool:
    """Copy the values in place; False leaves it to torch, where it is not ours and of another kind."""
    if is_watched(tensor):
        _refuse_other_kind(tensor, value, "parameter.data = ...")
    elif isinstance(tensor, nn.Parameter):
        return False  # of a model that was sharded by hand
    elif value.shape != tensor.shape or value.dtype != tensor.dtype or any(p.is_partial() for p in tensor.placements):
        return False
    _copy_into_shard(tensor, value, "parameter.data = ...")
    return True


def _copy_into_shard(tensor: DTensor, value: torch.Tensor, where: str) -> None:
    local = local_tensor(tensor)
    own = local_tensor(value) if isinstance(value, DTensor) else local_part(value, tensor)
    if isinstance(value, DTensor) and value.placements != tensor.placements:
        raise ShardError(
            f"a tensor laid out as {tensor.placements} was assigned one of {value.placements}",
            where=where,
            why="ranks would keep each other's parts",
            fix="assign a tensor of the same layout, or the whole tensor",
        )
    if not local.is_meta and own.data_ptr() != local.data_ptr():
        with torch.no_grad():
            local.copy_(own)


def _refuse_other_kind(parameter: torch.Tensor, value: torch.Tensor, where: str) -> None:
    if value.shape != parameter.shape or value.dtype != parameter.dtype:
        raise ShardError(
            f"a sharded parameter, {list(parameter.shape)} {parameter.dtype}, was assigned "
            f"{list(value.shape)} {value.dtype}",
            where=where,
            why="its group gathers the shard it was made with; torch would ignore the assignment",
            fix="change shape or dtype before sharding; ShardConfig.precision sets the dtype of computation",
        )


class LocalValue(torch.autograd.Function):
    """The local tensor of a replicated DTensor, which may be written to in place; the view of `to_local` may not."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> torch.Tensor:
        """An alias of the local tensor that autograd does not know as a view."""
        ctx.layout = parameter.device_mesh, parameter.placements
        return local_tensor(parameter).data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradient, laid out like the parameter."""
        return DTensor.from_local(gradients[0], *ctx.layout, run_check=False)


def keep_assigned(shown: torch.Tensor, parameter: DTensor) -> None:
    """Copy back what `shown.data = value` put into other memory."""
    local = local_tensor(parameter)
    if shown.data_ptr() != local.data_ptr():
        with torch.no_grad():
            local.copy_(shown)
