"""Writes to a part of a sharded tensor: `weight[2] = 0`, `weight.grad[3:5].mul_(2)`, `weight.index_fill_(...)`.

If a view spans parts of several ranks, torch returns a copy, so that writes to it are silently lost; other writes
raise. Here such a copy records the viewed parameter, gradient or other tensor: a write is applied to the full value,
and each rank keeps its part. All ranks must write the same values.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardwise import compat
from shardwise.errors import ShardError
from shardwise.models.nested_tensors import change_tensors, find_tensors
from shardwise.sharding.hooks.parameter_writes import is_watched
from shardwise.sharding.inventory import full_tensor, local_part, local_tensor
from shardwise.sharding.registry import described, users_line

_aten: Any = torch.ops.aten
_ALIASES = (_aten.detach.default, _aten.alias.default)
_VIEWS = (
    *_ALIASES, _aten.select.int, _aten.slice.Tensor, _aten.split.Tensor,
    _aten.split_with_sizes.default, _aten.unbind.int, _aten.view.default, _aten.diagonal.default, _aten.transpose.int,
    _aten.t.default, _aten.permute.default, _aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim,
    _aten.unfold.default, _aten.as_strided.default,
)  # fmt: skip
_WRITES = (
    _aten.index_fill_.int_Scalar, _aten.index_fill_.int_Tensor, _aten.scatter_.value, _aten.scatter_.src,
)  # fmt: skip
"""Writes that torch supports only for some arguments, in addition to those without a sharding strategy."""


@dataclasses.dataclass(frozen=True, slots=True)
class ViewOrigin:
    """Viewed tensor of a tensor, and the view operations from one to the other."""

    viewed: DTensor
    views: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the same view of the full value."""
        for view in self.views:
            whole = view(whole)
        return whole


_ORIGINS: dict[int, tuple[weakref.ref[DTensor], ViewOrigin]] = {}
"""Origins by identity; torch would save attributes with a state dict."""


class ShardView(DTensor):
    """A copy of a part of a sharded tensor; writes to it are applied to that tensor."""

    __slots__ = ()
    is_dispatched: ClassVar[bool] = False
    """Whether torch calls `__torch_dispatch__`; torch 2.11 treats all subclasses as DTensors."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Write to the viewed tensor, view the view, or compute: on DTensors, or on full values with plain tensors."""
        ShardView.is_dispatched = True
        kwargs = kwargs or {}
        tensors = find_tensors((args, kwargs))
        if func._schema.is_mutable and args and isinstance(args[0], ShardView):
            return _write(func, args, kwargs)
        if func in _VIEWS:
            return _view(func, args, kwargs, lambda: _as_dtensor(args[0], lambda: func(*args, **kwargs)))
        if not all(isinstance(tensor, DTensor) for tensor in tensors):
            return func(*change_tensors(args, _whole), **change_tensors(kwargs, _whole))
        views = [tensor for tensor in tensors if type(tensor) is ShardView]
        for view in views:
            view.__class__ = DTensor  # pyrefly: ignore[bad-argument-type]
        try:
            return func(*args, **kwargs)
        finally:
            for view in views:
                view.__class__ = ShardView

    def __reduce_ex__(self, proto: Any) -> Any:
        """Pickle as a DTensor."""
        return _as_dtensor(self, lambda: self.__reduce_ex__(proto))


def watch_views() -> None:
    """Support writes to views of sharded tensors, in this process."""
    for operator in _VIEWS:
        compat.answer_operator(
            operator, lambda plain, args, kwargs, operator=operator: _view(operator, args, kwargs, plain)
        )
    for operator in _WRITES:
        compat.answer_operator(operator, functools.partial(write_whole, operator))


def write_whole(operator: Any, plain: Callable[[], Any], args: Any, kwargs: Any) -> Any:
    """Write in place with torch's DTensors, or on the full value if they do not support it.

    Ranks:
        Collective for the full value.
    """
    if type(args[0]) is not ShardView and all(isinstance(each, DTensor) for each in find_tensors((args, kwargs))):
        try:
            return plain()
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise  # the other ranks do not gather
    return _write(operator, args, kwargs)


def _write(operator: Any, args: Any, kwargs: Any) -> Any:
    """Apply an operator to the full value of the viewed tensor; keep this rank's part of the result.

    Ranks:
        Collective over the tensor's mesh.
    """
    written = args[0]
    if not isinstance(written, DTensor):
        return operator(written, *change_tensors(args[1:], _whole), **change_tensors(kwargs, _whole))
    origin = _origin_of(written) or ViewOrigin(written)
    for tensor in (origin.viewed, written):
        reduce_partial(tensor)
    whole = full_tensor(origin.viewed)
    part = origin.of(whole)
    operator(part, *change_tensors(args[1:], _whole), **change_tensors(kwargs, _whole))
    if part.shape != written.shape:
        raise ShardError(
            f"{operator} of {described([written])}",
            where=users_line(),
            why="it changes the shape in place, and this rank has a part of the tensor",
            fix="use the function without the underscore, which returns a new tensor",
        )
    for tensor, value in ((origin.viewed, whole), (written, part)):
        local_tensor(tensor).copy_(local_part(value, tensor))
    return written


def _view(operator: Any, args: Any, kwargs: Any, plain: Callable[[], Any]) -> Any:
    """View with torch; a view that torch returns as a copy records its origin."""
    source = args[0]
    if source.is_meta or (operator in _ALIASES and type(source) is not ShardView):
        return plain()
    if torch.is_grad_enabled() and source.requires_grad:
        return compute_whole(operator, plain, args, kwargs) if is_watched(source) else plain()
    try:
        made = plain()
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        made = of_whole(operator, args, kwargs)
    origin, memory = _origin_of(source) or ViewOrigin(source), _memory(source)
    is_copy = type(source) is ShardView or (_is_partial(source) and not compat.in_backward())
    for index, tensor in enumerate(results := made if isinstance(made, (list, tuple)) else [made]):
        if not is_copy and _memory(tensor) == memory:
            continue

        def view(whole: torch.Tensor, index: int | None = index if results is made else None) -> torch.Tensor:
            seen = operator(whole, *args[1:], **kwargs)
            return seen if index is None else seen[index]

        key = id(tensor)
        _ORIGINS[key] = (
            weakref.ref(tensor, lambda _, key=key: _ORIGINS.pop(key, None)),
            ViewOrigin(origin.viewed, (*origin.views, view)),
        )
        tensor.__class__ = ShardView
        _watch_writes(tensor)
    return made


def reduce_partial(written: Any) -> None:
    """Reduce a partial tensor before a write: torch refuses to write to partial values, or writes each term.

    Ranks:
        Collective for a partial tensor.
    """
    if _is_partial(written):
        _as_dtensor(written, lambda: compat.reduce_in_place(written))


def _is_partial(tensor: Any) -> bool:
    return any(placement.is_partial() for placement in getattr(tensor, "placements", ()))


def _watch_writes(view: ShardView) -> None:
    """Handle writes to views in torch versions that do not call `__torch_dispatch__`."""
    if ShardView.is_dispatched or _WATCHED:
        return
    _aten.clone.default(view)
    if ShardView.is_dispatched:
        return
    _WATCHED.update(compat.in_place_operators())
    for operator in _WATCHED:
        compat.answer_operator(
            operator,
            lambda plain, args, kwargs, operator=operator: (
                _write(operator, args, kwargs) if type(args[0]) is ShardView else plain()
            ),
        )


_WATCHED: set[Any] = set()
"""In-place operators with a handler that checks for views."""


def _origin_of(tensor: torch.Tensor) -> ViewOrigin | None:
    reference, origin = _ORIGINS.get(id(tensor), (None, None))
    return origin if reference is not None and reference() is tensor else None


def of_whole(operator: Any, args: Any, kwargs: Any) -> Any:
    """Apply an operator to full values; the result is the same on every rank.

    Ranks:
        Collective.
    """
    mesh = next(each.device_mesh for each in find_tensors((args, kwargs)) if isinstance(each, DTensor))
    return change_tensors(
        operator(*change_tensors(args, _whole), **change_tensors(kwargs, _whole)),
        lambda tensor: DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False),
    )


def compute_whole(operator: Any, plain: Callable[[], Any], args: Any, kwargs: Any) -> Any:
    """Compute with DTensors, or with full values if torch does not support them.

    Ranks:
        Collective for full values.
    """
    try:
        return plain()
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError) or compat.in_backward():
            raise
        tensors = find_tensors((args, kwargs))
        refuse_gradient(f"{operator} of {described(tensors)}", tensors, "torch cannot compute it from the ranks' parts")
        return of_whole(operator, args, kwargs)


class NoGradientError(ShardError):
    """torch cannot compute a gradient of an operation on ranks' parts."""


def refuse_gradient(what: str, tensors: Iterable[torch.Tensor], why: str) -> None:
    """Raise if autograd would record a computation without a gradient over the ranks."""
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        raise NoGradientError(
            what,
            where=users_line(),
            why=why,
            fix="compute it in the model's forward or between its forward and backward; where no gradient is wanted, "
            "under torch.no_grad()",
        )


def _memory(tensor: DTensor) -> int:
    return compat.storage_id(local_tensor(tensor))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full value of a tensor. Collective if it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    return _as_dtensor(tensor, lambda: full_tensor(tensor))


def _as_dtensor(tensor: Any, function: Callable[[], Any]) -> Any:
    """Call a function with `tensor` as a regular DTensor."""
    kind, tensor.__class__ = tensor.__class__, DTensor
    try:
        return function()
    finally:
        tensor.__class__ = kind
