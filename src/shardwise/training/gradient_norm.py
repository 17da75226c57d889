"""The norm of gradients spread over any mix of meshes, placements and devices, plain tensors among them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.errors import ShardError
from shardwise.sharding.full_params import reshard
from shardwise.sharding.layout import local_tensor, sharded_axes


@dataclass(slots=True)
class Piece:
    """Gradients whose local norms are summed over the same ranks."""

    mesh: DeviceMesh | None
    axes: tuple[int, ...]
    grads: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True)
class Gradients:
    """All gradients of one norm. Pieces and dtype come from the parameters, so every rank finds the same."""

    pieces: list[Piece]
    dtype: torch.dtype
    """In which norms are summed: at least 32 bits."""

    def by_device_and_dtype(self) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
        """This rank's values, as fused operations want them."""
        return _by_device_and_dtype([grad for piece in self.pieces for grad in piece.grads])


def collect_gradients(parameters: torch.Tensor | Iterable[torch.Tensor] | nn.Module) -> Gradients:
    """Sort the gradients of `parameters` by the ranks over which they are spread.

    Raises:
        ShardError: A gradient is placed in another way than its parameter.

    Ranks:
        Local.
    """
    given = _as_list(parameters)
    pieces: dict[tuple[DeviceMesh | None, tuple[int, ...]], Piece] = {}
    for parameter in given:
        axes = sharded_axes(parameter) if isinstance(parameter, DTensor) else ()
        key = (parameter.device_mesh, axes) if isinstance(parameter, DTensor) and axes else (None, ())
        piece = pieces.setdefault(key, Piece(*key))
        if parameter.grad is not None:
            piece.grads.append(local_tensor(_laid_out_like(parameter, parameter.grad)))
    wide = any(parameter.dtype in (torch.float64, torch.complex128) for parameter in given)
    # Not in the order of the parameters, in which ranks may differ (a Python set): pieces are summed one after another.
    ordered = sorted(pieces.values(), key=lambda piece: _mesh_key(piece.mesh, piece.axes))
    return Gradients(ordered, torch.float64 if wide else torch.float32)


def _mesh_key(mesh: DeviceMesh | None, axes: tuple[int, ...]) -> tuple[object, ...]:
    return () if mesh is None else (mesh.ndim, mesh.mesh_dim_names or (), mesh.shape, axes)


def _as_list(parameters: torch.Tensor | Iterable[torch.Tensor] | nn.Module) -> list[torch.Tensor]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    if isinstance(parameters, nn.Module):
        reshard(parameters)
        parameters = parameters.parameters()
    return list(dict.fromkeys(parameters))  # a tied parameter given twice is still one


def _laid_out_like(parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    if not isinstance(grad, DTensor) or not isinstance(parameter, DTensor):
        return grad
    if any(placement.is_partial() for placement in grad.placements):
        raise ShardError(
            f"a gradient of shape {tuple(grad.shape)} is not reduced yet: {grad.placements}",
            where="clip_grad_norm_",
            why="ranks hold summands of this gradient, whose norms do not add up to its norm",
            fix="parameter.grad = parameter.grad.redistribute(placements=parameter.placements)",
        )
    if grad.placements != parameter.placements:
        raise ShardError(
            f"a gradient is placed {grad.placements}, its parameter {parameter.placements}",
            where="clip_grad_norm_",
            why="parameters say over which ranks norms are summed",
            fix="parameter.grad = parameter.grad.redistribute(placements=parameter.placements)",
        )
    return grad


def total_norm(gradients: Gradients, p: float) -> torch.Tensor:
    """The p-norm of all gradients as one vector, as a plain 0-d tensor.

    Ranks:
        Collective. One scalar all-reduce per piece and mesh axis it is sharded over.
    """
    total = torch.zeros((), device=_home_device(gradients.pieces), dtype=gradients.dtype)
    for piece in gradients.pieces:
        power = _power_sum(piece.grads, p, total)
        if piece.mesh is not None:
            _reduce(power, piece.mesh, piece.axes, p)
        total = torch.maximum(total, power) if math.isinf(p) else total + power
    return total if math.isinf(p) else total ** (1.0 / p)


def _power_sum(grads: list[torch.Tensor], p: float, like: torch.Tensor) -> torch.Tensor:
    """Sum of |x|^p over this rank's values, or the largest |x|; NaN if there is one."""
    norms: list[torch.Tensor] = []
    for (_, dtype), alike in _by_device_and_dtype(grads).items():
        if dtype.is_complex:
            alike = [grad.abs() for grad in alike]
        norms.append(torch.stack(torch._foreach_norm(alike, p, dtype=like.dtype)).to(like))
    if not norms:
        return torch.zeros_like(like)
    norm = torch.linalg.vector_norm(torch.cat(norms), p)
    return norm if math.isinf(p) else norm**p


def _reduce(power: torch.Tensor, mesh: DeviceMesh, axes: tuple[int, ...], p: float) -> None:
    for axis in axes:
        group = mesh.get_group(axis)
        if not math.isinf(p):
            dist.all_reduce(power, group=group)
            continue
        # A maximum loses NaN on some backends; a second value carries it.
        both = torch.stack([power.nan_to_num(0.0, math.inf), power.isnan().to(power)])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        power.copy_(torch.where(both[1] > 0, math.nan, both[0]))


def _by_device_and_dtype(
    tensors: list[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > 0:  # an empty shard has no largest value
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups


def _home_device(pieces: list[Piece]) -> torch.device:
    """Where scalars are summed: the mesh's device, as offloaded gradients may lie where none can be sent."""
    for piece in pieces:
        if piece.mesh is not None:
            return torch.device(piece.mesh.device_type)
    return next((grad.device for piece in pieces for grad in piece.grads), torch.device("cpu"))
