"""DTensors, storages and views."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def base_of_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that `tensor` is a view of, for autograd's purposes."""
    return tensor._base


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a tensor; also tells meta tensors apart, whose data pointer is 0."""
    return tensor.untyped_storage()._cdata


def dtensor_like(local: torch.Tensor, parameter: DTensor) -> DTensor:
    """`local` as the part of a DTensor placed like `parameter`; unlike `from_local` it stays on its device."""
    meta = TensorMeta(parameter.shape, parameter.stride(), local.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def adopt_shard(fsdp_param: Any) -> None:
    """Let FSDP2 take what is registered now for a parameter's shard; it pads and pins it where it needs to."""
    fsdp_param.reset_sharded_param()


def replace_in_place(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Give `old` the storage and device of `new`, so that every holder of `old` (ties, optimizers) sees it.

    Returns:
        `old`; or a new tensor that must be registered in its place, where torch cannot swap them.
    """
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)  # marks that a user set on the parameter
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:  # recurrent layers hold their weights weakly, a graph may hold them too
        return new
    return old


def is_aliased(tensor: torch.Tensor) -> bool:
    """Whether another tensor (a view, `.data`) holds the same storage."""
    # One count is the tensor's, one that of the storage object made here.
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2


def shard_device(fsdp_param: Any) -> torch.device:
    """Where the group keeps this parameter's shard: the CPU when offloading, else its compute device."""
    return torch.device("cpu") if fsdp_param.offload_to_cpu else fsdp_param.device


def gathering_device(fsdp_param: Any) -> torch.device:
    """Where the parameter is gathered and computed with."""
    return fsdp_param.device


def axes_in_cutting_order(spec: Any, dim: int) -> list[int]:
    """The mesh axes of a DTensor's spec, those that cut `dim` in the order in which they do."""
    axes = list(range(spec.mesh.ndim))
    for entry in getattr(spec, "shard_order", None) or ():
        if entry.tensor_dim == dim and list(entry.mesh_dims) != sorted(entry.mesh_dims):
            return list(entry.mesh_dims) + [axis for axis in axes if axis not in entry.mesh_dims]
    return axes


def spec_of(tensor: DTensor) -> Any:
    """Mesh, placements, shape and dtype of a DTensor; hashable, and its hash is computed once."""
    return tensor._spec


def split_rows(placement: Any, rows: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Row numbers as a placement that shards would divide them among `count` ranks, in its own manner."""
    strided = type(placement)(dim=0, split_factor=placement.split_factor) if _is_strided(placement) else Shard(0)
    return tuple(strided._split_tensor(rows, count, with_padding=False)[0])


def _is_strided(placement: Any) -> bool:
    return hasattr(placement, "split_factor")


def watch_data(
    kind: type[torch.Tensor],
    on_read: Callable[[Any], None],
    assign: Callable[[Any, torch.Tensor], bool],
) -> None:
    """Call `on_read(tensor)` at each `tensor.data` of a class of tensors, and `assign(tensor, value)` at assignments.

    Where `assign` returns False, torch goes on: of a DTensor it changes only the wrapper's metadata; the local tensor,
    which is what trains, stays as it was.
    """
    plain: Any = torch._C.TensorBase.data  # the descriptor, not a tensor

    def get_data(self: torch.Tensor) -> torch.Tensor:
        on_read(self)
        return plain.__get__(self)

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        if not assign(self, value):
            plain.__set__(self, value)

    get_and_set: Any = property(get_data, set_data)
    setattr(kind, "data", get_and_set)  # noqa: B010 - type checkers know it as an attribute of instances
