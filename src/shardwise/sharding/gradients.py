"""What FSDP2 leaves undone: gradients outside its groups, parameters that some ranks did not use, `zero_grad`."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.sharding.registry import sharded_roots


class UnusedParameters:
    """Sends zeros for parameters that got no gradient here, and remembers which those were.

    FSDP2 reduces what has a gradient. Where a router left an expert out on one rank only, ranks would reduce buffers of
    different sizes.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self._tracked = compat.parameter_records(groups)
        self._used: set[int] = set()
        self._filled: set[int] = set()
        for group in groups:
            compat.before_post_backward(group, lambda group=group: self._fill(group))

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to track."""
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
        """One per tracked parameter: whether it got a gradient on this rank."""
        return torch.tensor([float(id(param) in self._used) for param in self._tracked], device=device)

    def settle(self, counts: torch.Tensor) -> None:
        """Take away the zeros of parameters that no rank used, as one process would have no gradient for them."""
        for param, count in zip(self._tracked, counts.tolist(), strict=True):
            if count == 0 and id(param) in self._filled:
                compat.sharded_parameter(param).grad = None
        self.forget()

    def forget(self) -> None:
        """Drop what was noted of a backward."""
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
        """`places` are the modules and names that register parameters outside the groups."""
        self._groups, self._device = compat.param_groups(model), compat.compute_device(model)
        self._process_groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
        self._num_ranks = mesh.size()
        self._places, self._unused = list(places), unused
        if unused.is_needed or (self._places and self._num_ranks > 1):
            compat.on_backward_end(model, self._finish)

    def _finish(self) -> None:
        if not all(compat.reduces_gradients(group) for group in self._groups[:1]):
            return  # accumulating: the last micro-step averages the sum
        # Looked up each time: materialising a model, or moving it, registers new parameters.
        registered = [module._parameters[name] for module, name in self._places]
        trainable = [parameter for parameter in registered if parameter is not None and parameter.requires_grad]
        locals_ = [_local_gradient(parameter) for parameter in trainable]
        device = self._device
        present = torch.tensor([float(gradient is not None) for gradient in locals_], device=device)
        for dtype, members in _buckets(trainable).items():
            self._average(members, trainable, locals_, dtype)
        counts = torch.cat([present, self._unused.flags(device)])
        self._sum(counts)
        held = counts[: len(trainable)].tolist()
        for parameter, count in zip(trainable, held, strict=True):
            if count == 0:
                parameter.grad = None  # nobody used it: as in one process
        self._unused.settle(counts[len(trainable) :])

    def _average(
        self, members: list[int], trainable: list[nn.Parameter], locals_: list[torch.Tensor | None], dtype: torch.dtype
    ) -> None:
        """Average the gradients of `members` in one buffer of a dtype wide enough."""
        flat: list[torch.Tensor] = []
        for index in members:
            gradient = locals_[index]
            if gradient is None:
                gradient = torch.zeros_like(_local(trainable[index]), requires_grad=False)
                locals_[index] = gradient
            real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            flat.append(real.reshape(-1).to(dtype))
        buffer = torch.cat(flat)
        self._sum(buffer)
        buffer /= self._num_ranks
        for index, piece in zip(members, buffer.split([part.numel() for part in flat]), strict=True):
            gradient = locals_[index]
            assert gradient is not None
            real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            real.copy_(piece.view_as(real))
            _set_gradient(trainable[index], gradient)

    def _sum(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            for group in self._process_groups:
                dist.all_reduce(tensor, group=group)


def _buckets(parameters: list[nn.Parameter]) -> dict[torch.dtype, list[int]]:
    """Indices by the dtype they are averaged in: 16-bit gradients are summed in float32."""
    buckets: dict[torch.dtype, list[int]] = {}
    for index, parameter in enumerate(parameters):
        real = parameter.dtype.to_real() if parameter.is_complex() else parameter.dtype
        wide = torch.float64 if real is torch.float64 else torch.float32
        buckets.setdefault(wide, []).append(index)
    return buckets


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    return None if parameter.grad is None else _local(parameter.grad)


def _set_gradient(parameter: nn.Parameter, local: torch.Tensor) -> None:
    if parameter.grad is not None:
        return  # it was averaged in place
    if isinstance(parameter, DTensor):
        parameter.grad = DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False)
    else:
        parameter.grad = local


@functools.cache
def watch_zero_grad() -> None:
    """Make `zero_grad` of any module clear the gradients of its parameters in the models that shardwise sharded.

    torch clears those of the parameters that are registered at the time. Between forward and backward these are the
    unsharded ones in the root and in every group that stays unsharded, so that the shards' gradients of step after
    step add up. On the class, since the caller may be any part of the model or a wrapper around it.

    Ranks:
        Local.
    """
    plain = nn.Module.zero_grad

    @functools.wraps(plain)
    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        plain(self, set_to_none)
        groups = [group for root in sharded_roots() for group in compat.param_groups(root)]
        compat.clear_gradients(groups, set(self.modules()), set_to_none=set_to_none)

    nn.Module.zero_grad = zero_grad
