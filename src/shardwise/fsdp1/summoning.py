"""summon_full_params(): whole parameters in place of the shards, gradients with them where asked."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.errors import ConfigError
from shardwise.sharding.full_params import full_params
from shardwise.sharding.layout import local_part, local_tensor

Places = list[tuple[nn.Module, str, nn.Parameter]]


@contextmanager
def summon(
    module: nn.Module,
    units: Iterable[Any],
    *,
    recurse: bool = False,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """What `FullyShardedDataParallel.summon_full_params` does.

    A unit that is called inside runs on the whole parameters; one that is not summoned (`recurse=False`) gathers its
    own as ever, so that a wrapped model's `generate` can be called.

    Args:
        module: A unit, or a module that holds some.
        units: Those to be summoned; the first of each tree is its root.
        recurse: Also the units inside a unit.
        writeback: Keep what the block changes.
        rank0_only: Only the first rank gets values; elsewhere parameters are on the meta device.
        offload_to_cpu: Whole parameters are put into CPU memory.
        with_grads: Gradients are whole too, and written back with `writeback`.

    Raises:
        ConfigError: A combination that FSDP1 refuses too.

    Ranks:
        Collective, on entering and, with `writeback`, on leaving.
    """
    _refuse(writeback, rank0_only, offload_to_cpu, with_grads)
    units = list(units)
    grads = _whole_gradients(module, recurse) if with_grads else []
    with full_params(module, writeback=writeback, rank0_only=rank0_only, recurse=recurse):
        if offload_to_cpu:
            _offload(module, recurse)
        for owner, name, _, grad in grads:
            owner._parameters[name].grad = grad  # pyrefly: ignore[missing-attribute]
        before = [unit.is_summoned for unit in units]
        for unit in units:
            unit.is_summoned = True
        try:
            yield
            if writeback:
                for owner, name, sharded, _ in grads:
                    _write_gradient(sharded, owner._parameters[name].grad)  # pyrefly: ignore[missing-attribute]
        finally:
            for unit, was_summoned in zip(units, before, strict=True):
                unit.is_summoned = was_summoned


def _refuse(writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool) -> None:
    where = "summon_full_params"
    if writeback and rank0_only:
        raise ConfigError(
            "writeback=True and rank0_only=True are given",
            where=where,
            why="the other ranks hold nothing that could be written back",
            fix="writeback=False, or rank0_only=False",
        )
    if with_grads and (offload_to_cpu or rank0_only):
        raise ConfigError(
            "with_grads=True is given with offload_to_cpu or rank0_only",
            where=where,
            why="a gradient is where its parameter is, on every rank",
            fix="leave the other one out",
        )


def own_slots(module: nn.Module, recurse: bool) -> Places:
    """Where parameters are registered, without the units inside unless `recurse`."""
    found: Places = []
    waiting, seen = [module], set()
    while waiting:
        owner = waiting.pop()
        if owner in seen:
            continue
        seen.add(owner)
        found += [(owner, name, parameter) for name, parameter in owner._parameters.items() if parameter is not None]
        children = [child for child in owner._modules.values() if child is not None]
        waiting += [child for child in reversed(children) if recurse or not isinstance(child, FSDPModule)]
    return found


def _whole_gradients(
    module: nn.Module, recurse: bool
) -> list[tuple[nn.Module, str, nn.Parameter, torch.Tensor | None]]:
    for group in compat.param_groups(module):
        compat.settle(group)
    whole: dict[int, torch.Tensor | None] = {}
    found = []
    for owner, name, parameter in own_slots(module, recurse):
        if id(parameter) not in whole:
            grad = parameter.grad
            whole[id(parameter)] = grad.full_tensor() if isinstance(grad, DTensor) else grad
        found.append((owner, name, parameter, whole[id(parameter)]))
    return found


def _write_gradient(sharded: nn.Parameter, whole: torch.Tensor | None) -> None:
    if sharded.grad is None or whole is None:
        sharded.grad = None if whole is None else sharded.grad
    elif whole is not sharded.grad:
        local_tensor(sharded.grad).copy_(local_part(whole, sharded.grad))


def _offload(module: nn.Module, recurse: bool) -> None:
    for owner, name, _ in own_slots(module, recurse):
        parameter = owner._parameters[name]
        if parameter is not None and not parameter.is_meta:
            parameter.data = parameter.data.cpu()
