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
    """Identity of the memory behind a tensor; also tells meta tensors apart, whose data pointer is 0."""
    return tensor.untyped_storage()._cdata


def dtensor_like(local: torch.Tensor, parameter: DTensor) -> DTensor:
    """`local` as the part of a DTensor placed like `parameter`; unlike `from_local` it stays on its device."""
    meta = TensorMeta(parameter.shape, parameter.stride(), local.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def preserved_version(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """What is written to `tensor` inside is not counted as a change that autograd or anybody else should notice."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)


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


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """Return the flattened mesh, a slice of the same root mesh; cached.

    Ranks:
        Collective, the first time.
    """
    return mesh._flatten()


def joined_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """The axes of several slices of one root mesh as one mesh; no process group is made."""
    return DeviceMesh._concatenate(list(meshes))


def is_aliased(tensor: torch.Tensor) -> bool:
    """Whether another tensor (a view, `.data`) holds the same storage."""
    # One count is the tensor's, one that of the storage object made here.
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2


def cuts_along(spec: Any, dim: int) -> list[tuple[int, Any]]:
    """The mesh axes that cut `dim` of a DTensor, in the order in which they do, each with its placement.

    FSDP2 cuts what tensor or expert parallelism has left of a dimension, and writes that as `_StridedShard` with the
    number of parts that the later axes make: such an axis comes after those, as a plain `Shard`. Read from left to
    right, as torch's own functions do, uneven sizes would give other rows.
    """
    axes = [
        axis
        for axis, placement in enumerate(spec.placements)
        if not placement.is_replicate() and not placement.is_partial() and placement.dim % len(spec.shape) == dim
    ]
    for entry in getattr(spec, "shard_order", None) or ():
        if entry.tensor_dim == dim:
            axes = list(entry.mesh_dims)
    cuts, nested, num_parts = [], [], 1
    for axis in reversed(axes):
        placement = spec.placements[axis]
        if num_parts > 1 and getattr(placement, "split_factor", 1) == num_parts:
            nested.append((axis, Shard(dim)))
        else:
            cuts.insert(0, (axis, placement))
        num_parts *= spec.mesh.size(axis)
    return cuts + nested


def spec_of(tensor: DTensor) -> Any:
    """Mesh, placements, shape and dtype of a DTensor; hashable, and its hash is computed once."""
    return tensor._spec


def split_rows(placement: Any, rows: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Row numbers as a placement that shards would divide them among `count` ranks, in its own manner."""
    is_strided = hasattr(placement, "split_factor")
    strided = type(placement)(dim=0, split_factor=placement.split_factor) if is_strided else Shard(0)
    return tuple(strided._split_tensor(rows, count, with_padding=False)[0])


def watch_data(
    kind: type[torch.Tensor],
    on_read: Callable[[Any, torch.Tensor], None],
    assign: Callable[[Any, torch.Tensor], bool],
) -> None:
    """Call `on_read(tensor, data)` at each `tensor.data` of a class of tensors, `assign(tensor, value)` at assignments.

    Where `assign` returns False, torch continues: it changes only the metadata of a DTensor; the local tensor,
    which is what trains, stays as it was.
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
    """Reduce a partial DTensor in place; every rank gets the full tensor."""
    whole = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    tensor._local_tensor, tensor._spec = whole._local_tensor, whole._spec


def answer_operator(operator: Any, answer: Callable[[Callable[[], Any], Any, Any], Any]) -> None:
    """Let `answer(plain, args, kwargs)` run an operator on DTensors; `plain()` runs it as before, or as torch does."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers  # pyrefly: ignore[bad-assignment]
    earlier = _ANSWERS.get(operator)

    def handle(operator: Any, args: Any, kwargs: Any) -> Any:
        def plain() -> Any:
            if earlier is not None:
                return earlier(operator, args, kwargs)
            handlers.pop(operator, None)  # another thread may have
            try:
                return operator(*args, **kwargs)
            finally:
                handlers[operator] = _ANSWERS[operator]

        return answer(plain, args, kwargs)

    handlers[operator] = _ANSWERS[operator] = handle


_ANSWERS: dict[Any, Any] = {}
"""Our newest handler of each operator."""


def replicates_implicitly() -> bool:
    """Whether plain tensors count as replicated now: inside `implicit_replication()`."""
    return DTensor._op_dispatcher._allow_implicit_replication


def in_place_operators() -> list[Any]:
    """Every operator of torch's own that writes to a tensor in place."""
    return [operator for operator in _operators() if re.search(r"\w_(\.|$)", operator.name())]


def operators_without_strategy() -> list[Any]:
    """Operators on tensors for which torch knows no way on DTensors; random ones are left out."""
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
        )  # they change memory, not values
    ]


@functools.cache
def _operators() -> list[Any]:
    names = [re.fullmatch(r"aten::([a-z]\w*)(?:\.(\w+))?", name) for name in torch._C._dispatch_get_all_op_names()]
    packets = [(getattr(torch.ops.aten, name[1], None), name[2] or "default") for name in names if name is not None]
    return [operator for packet, name in packets if (operator := getattr(packet, name, None)) is not None]
