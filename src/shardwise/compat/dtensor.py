"""DTensors, storages and views."""

import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def base_of_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that `tensor` is a view of, for autograd's purposes."""
    return tensor._base


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage; also distinguishes meta tensors, whose data pointer is 0."""
    return tensor.untyped_storage()._cdata


def dtensor_like(local: torch.Tensor, parameter: DTensor) -> DTensor:
    """Return a DTensor with this local tensor, placed like `parameter`; unlike `from_local` it keeps the device."""
    meta = TensorMeta(parameter.shape, parameter.stride(), local.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def preserved_version(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Hide writes to `tensor` inside the block from its version counter, which autograd checks."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)


def replace_in_place(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Give `old` the storage and device of `new`, so that every reference to `old` (ties, optimizers) stays valid.

    Returns:
        `old`; or, if torch cannot swap them, a new tensor to register in its place.
    """
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)  # user attributes of the parameter
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:  # weak references (recurrent layers), or references from a graph
        return new
    return old


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """Return the flattened mesh, a slice of the same root mesh; cached.

    Ranks:
        Collective on the first call.
    """
    return mesh._flatten()


def joined_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """Join several slices of one root mesh into one mesh; creates no process group."""
    return DeviceMesh._concatenate(list(meshes))


def is_aliased(tensor: torch.Tensor) -> bool:
    """Whether another tensor (a view, `.data`) shares the storage."""
    # Two references: the tensor's, and the storage object created here.
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2


def cuts_along(spec: Any, dim: int) -> list[tuple[int, Any]]:
    """Return the mesh axes that shard `dim` of a DTensor, in the order of sharding, each with its placement.

    FSDP2 shards the tensor- or expert-parallel shards once more. Its placement is a `_StridedShard` with the number of
    parts of the later axes, so here that axis follows them, as a plain `Shard`. Applying the placements from left to
    right, as torch's own functions do, would give other rows for uneven sizes.
    """
    axes = [
        axis
        for axis, placement in enumerate(spec.placements)
        if not placement.is_replicate() and not placement.is_partial() and placement.dim % len(spec.shape) == dim
    ]
    for entry in getattr(spec, "shard_order", None) or ():
        if entry.tensor_dim == dim:
            axes = list(entry.mesh_dims)
    outer, nested, num_parts = [], [], 1
    for axis in reversed(axes):
        placement = spec.placements[axis]
        if num_parts > 1 and getattr(placement, "split_factor", 1) == num_parts:
            nested.append((axis, Shard(dim)))
        else:
            outer.insert(0, (axis, placement))
        num_parts *= spec.mesh.size(axis)
    return outer + nested


def spec_of(tensor: DTensor) -> Any:
    """Mesh, placements, shape and dtype of a DTensor; hashable, with a cached hash."""
    return tensor._spec


def split_rows(placement: Any, rows: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Split row numbers over `count` ranks as `placement` does, which must be a sharding one."""
    is_strided = hasattr(placement, "split_factor")
    strided = type(placement)(dim=0, split_factor=placement.split_factor) if is_strided else Shard(0)
    return tuple(strided._split_tensor(rows, count, with_padding=False)[0])


def watch_data(
    kind: type[torch.Tensor],
    on_read: Callable[[Any, torch.Tensor], None],
    assign: Callable[[Any, torch.Tensor], bool],
) -> None:
    """Call `on_read(tensor, data)` at reads of `tensor.data` of a tensor class, and `assign(tensor, value)` at writes.

    If `assign` returns False, torch assigns: for a DTensor it changes only the metadata, and the local tensor, which is
    trained, stays unchanged.
    """
    plain: Any = torch._C.TensorBase.data  # the descriptor, not a tensor

    def get_data(self: torch.Tensor) -> torch.Tensor:
        data = plain.__get__(self)
        on_read(self, data)
        return data

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        if not assign(self, value):
            plain.__set__(self, value)

    get_and_set: Any = property(get_data, set_data)
    setattr(kind, "data", get_and_set)  # noqa: B010 - type checkers know it as an attribute of instances


def copy_memory(tensor: DTensor) -> None:
    """Copy the local tensor of a DTensor to new memory."""
    tensor._local_tensor = tensor._local_tensor.clone()


def reduce_in_place(tensor: DTensor) -> None:
    """Reduce a partial DTensor in place; every rank gets the full tensor.

    Ranks:
        Collective over the tensor's mesh.
    """
    whole = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    tensor._local_tensor, tensor._spec = whole._local_tensor, whole._spec


def answer_operator(operator: Any, answer: Callable[[Callable[[], Any], Any, Any], Any]) -> None:
    """Run an operator on DTensors by `answer(plain, args, kwargs)`; `plain()` runs the earlier handler, or torch's."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers  # pyrefly: ignore[bad-assignment]
    earlier = _ANSWERS.get(operator)

    def handle(operator: Any, args: Any, kwargs: Any) -> Any:
        def plain() -> Any:
            if earlier is not None:
                return earlier(operator, args, kwargs)
            handlers.pop(operator, None)  # absent if another thread removed it
            try:
                return operator(*args, **kwargs)
            finally:
                handlers[operator] = _ANSWERS[operator]

        return answer(plain, args, kwargs)

    handlers[operator] = _ANSWERS[operator] = handle


_ANSWERS: dict[Any, Any] = {}
"""The latest handler of each operator."""


def replicates_implicitly() -> bool:
    """Whether plain tensors currently count as replicated, as inside `implicit_replication()`."""
    return DTensor._op_dispatcher._allow_implicit_replication


def in_place_operators() -> list[Any]:
    """All operators of torch that write to a tensor in place."""
    return [operator for operator in _operators() if re.search(r"\w_(\.|$)", operator.name())]


def operators_without_strategy() -> list[Any]:
    """Operators without a sharding strategy for DTensors; random ones are excluded."""
    tables = [table for table in vars(DTensor._op_dispatcher.sharding_propagator).values() if isinstance(table, dict)]
    known = {operator for table in tables for operator in table}.union(DTensor._op_dispatcher._custom_op_handlers)
    return [
        operator
        for operator in _operators()
        if operator not in known
        and operator._schema.returns
        and not any(argument.is_out for argument in operator._schema.arguments)
        and not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")
        and torch.Tag.nondeterministic_seeded not in operator.tags
        and not operator._schema.name.startswith(
            ("aten::resize", "aten::set", "aten::sparse")
        )  # these change memory, not values
    ]


@functools.cache
def _operators() -> list[Any]:
    names = [re.fullmatch(r"aten::([a-z]\w*)(?:\.(\w+))?", name) for name in torch._C._dispatch_get_all_op_names()]
    packets = [(getattr(torch.ops.aten, name[1], None), name[2] or "default") for name in names if name is not None]
    return [operator for packet, name in packets if (operator := getattr(packet, name, None)) is not None]
