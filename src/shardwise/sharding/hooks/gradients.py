"""Gradients that FSDP2 does not handle: outside groups, unused parameters, hooks on parameters, `zero_grad`."""

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from shardwise import compat
from shardwise.errors import ShardError
from shardwise.sharding.inventory import full_tensor, local_part
from shardwise.sharding.registry import sharded_roots


class UnusedParameters:
    """Reduces zeros for parameters without a gradient on this rank, and records them.

    FSDP2 reduces only existing gradients. If a router skips an expert on one rank only, ranks would reduce buffers of
    different sizes.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self._tracked = compat.parameter_records(groups)
        self._used: set[int] = set()
        self._filled: set[int] = set()
        for group in groups:
            compat.around_post_backward(group, lambda group=group: self._fill(group))

    @property
    def is_needed(self) -> bool:
        """Whether there are parameters to track."""
        return bool(self._tracked)

    def _fill(self, group: Any) -> None:
        for param in compat.parameter_records([group]):
            filled = compat.fill_unused_gradient(group, param)
            if filled is None:
                continue
            if not filled:
                self._used.add(id(param))
            elif compat.sharded_parameter(param).grad is None:
                self._filled.add(id(param))

    def flags(self, device: torch.device) -> torch.Tensor:
        """Return one flag per tracked parameter: whether it got a gradient on this rank."""
        return torch.tensor([float(id(param) in self._used) for param in self._tracked], device=device)

    def drop_unused_zeros(self, counts: torch.Tensor) -> None:
        """Remove the zero gradients of parameters that no rank used, as in one process."""
        for param, count in zip(self._tracked, counts.tolist(), strict=True):
            if count == 0 and id(param) in self._filled:
                compat.sharded_parameter(param).grad = None
        self.forget()

    def forget(self) -> None:
        """Drop the records of a backward."""
        self._used.clear()
        self._filled.clear()


class BackwardEnd:
    """One collective after backward: averages gradients outside the groups and agrees on unused parameters."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        places: Sequence[tuple[nn.Module, str]],
        unused: UnusedParameters,
    ) -> None:
        """`places`: modules and attribute names of parameters outside the groups."""
        self._groups, self._device = compat.param_groups(model), compat.compute_device(model)
        self._process_groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
        self._num_ranks = mesh.size()
        self._places, self._unused = list(places), unused
        if unused.is_needed or (self._places and self._num_ranks > 1):
            compat.on_backward_end(model, self._finish)

    def _finish(self) -> None:
        if not all(compat.reduces_gradients(group) for group in self._groups[:1]):
            return  # accumulating: the last micro-step averages the sum
        # Looked up each time: materializing or moving a model registers new parameters.
        registered = [module._parameters[name] for module, name in self._places]
        trainable = [parameter for parameter in registered if parameter is not None and parameter.requires_grad]
        device = next((g.device for g in self._groups), torch.device("cpu"))
        present = torch.tensor([float(parameter.grad is not None) for parameter in trainable], device=device)
        wide = {parameter for parameter in trainable if parameter.dtype in (torch.float64, torch.complex128)}
        self._average([parameter for parameter in trainable if parameter not in wide], torch.float32)
        self._average([parameter for parameter in trainable if parameter in wide], torch.float64)
        counts = torch.cat([present, self._unused.flags(device)])
        self._sum(counts)
        for parameter, count in zip(trainable, counts[: len(trainable)].tolist(), strict=True):
            if count == 0:
                parameter.grad = None  # unused on all ranks: as in one process
        self._unused.drop_unused_zeros(counts[len(trainable) :])

    @torch.no_grad()
    def _average(self, parameters: list[nn.Parameter], dtype: torch.dtype) -> None:
        """Average the gradients in one buffer of a wide enough dtype; missing gradients are zeros."""
        parts: list[torch.Tensor] = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            parts.append(torch.view_as_real(local) if local.is_complex() else local)
        if not parts:
            return
        buffer = torch.cat([part.reshape(-1).to(dtype) for part in parts])
        self._sum(buffer)
        buffer /= self._num_ranks
        for part, mean in zip(parts, buffer.split([part.numel() for part in parts]), strict=True):
            part.copy_(mean.view_as(part))

    def _sum(self, tensor: torch.Tensor) -> None:
        """Add a tensor up over the ranks. Collective."""
        if tensor.numel():
            for group in self._process_groups:
                dist.all_reduce(tensor, group=group)


def copy_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Copy attributes and hooks to a parameter that replaces another."""
    for name, value in old.__dict__.items():
        new.__dict__.setdefault(name, value)
    for_gradient, for_sum = compat.hooks_of(old) if new.requires_grad else ([], [])
    for hook in for_gradient:
        new.register_hook(hook)
    for hook in for_sum:
        new.register_post_accumulate_grad_hook(hook)


class ParameterHooks:
    """Calls the hooks on the sharded parameters of a group (`register_hook`) with each reduced gradient.

    FSDP2 computes gradients of the unsharded parameters and ignores hooks on the sharded ones.
    """

    def __init__(self, group: Any) -> None:
        self._group = weakref.ref(group)
        self._earlier: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        compat.around_post_backward(group, self._set_aside, self._call)

    def _set_aside(self) -> None:
        """Set aside gradients accumulated by earlier backwards: hooks receive the gradient of this one."""
        group = self._group()
        for parameter in () if group is None else compat.sharded_parameters(group):
            gradient = parameter.grad  # of a loss that used some rows; FSDP2 adds this rank's part to it
            is_spread = isinstance(gradient, DTensor) and isinstance(parameter, DTensor)
            if is_spread and gradient.placements != parameter.placements:
                own = local_part(full_tensor(gradient), parameter).contiguous()
                parameter.grad = compat.dtensor_like(own, parameter)
        if group is not None and compat.reduces_gradients(group):
            for parameter in compat.sharded_parameters(group):
                if compat.hooks_of(parameter)[0]:
                    self._earlier.append((parameter, parameter.grad))
                    parameter.grad = None

    @torch.no_grad()
    def _call(self) -> None:
        if self._earlier:
            compat.wait_for_reduced_gradients([self._group()])
        for parameter, earlier in self._earlier:
            gradient = parameter.grad
            for hook in compat.hooks_of(parameter)[0] if gradient is not None else ():
                _refuse_multi_grad_hook(hook, parameter)
                with implicit_replication():  # a mask is the same tensor on all ranks
                    changed = hook(gradient)
                gradient = gradient if changed is None else changed
            if gradient is not None and not isinstance(gradient, DTensor):
                raise ShardError(
                    "a hook on a sharded parameter returned a plain tensor",
                    where=f"a parameter of shape {list(parameter.shape)}",
                    why="the gradient is a DTensor, and each rank has a part of it",
                    fix="compute the result from the gradient, as in gradient * mask",
                )
            if earlier is not None:
                gradient = earlier if gradient is None else earlier + gradient
            parameter.grad = gradient
        self._earlier.clear()


def _refuse_multi_grad_hook(hook: Any, parameter: nn.Parameter) -> None:
    if "register_multi_grad_hook." in getattr(hook, "__qualname__", ""):
        raise ShardError(
            "register_multi_grad_hook on sharded parameters",
            where=f"a parameter of shape {list(parameter.shape)}",
            why="torch calls it when autograd has reached all of them, but autograd only reaches the unsharded ones",
            fix="parameter.register_hook for each, or call the function after backward()",
        )


def step_in_backward(root: nn.Module) -> None:
    """Step the optimizers that run in backward (`_apply_optimizer_in_backward`) once gradients are reduced."""
    compat.on_backward_end(root, functools.partial(compat.step_in_backward, compat.param_groups(root)))


@functools.cache
def watch_zero_grad() -> None:
    """Make `zero_grad` of any module clear the gradients of its parameters in the models that shardwise sharded.

    torch clears the gradients of the currently registered parameters. Between forward and backward these are the
    unsharded ones in the root and in all groups that stay unsharded, so that gradients of the shards would accumulate
    over steps. The method is replaced on the class, because the caller may be any submodule or a wrapper.
    """
    plain = nn.Module.zero_grad

    @functools.wraps(plain)
    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        plain(self, set_to_none)
        groups = [group for root in sharded_roots() for group in compat.param_groups(root)]
        compat.clear_gradients(groups, set(self.modules()), set_to_none=set_to_none)

    nn.Module.zero_grad = zero_grad
