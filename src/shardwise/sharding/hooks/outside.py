"""Sharded parameters in code outside the model: in a loss, a penalty, an average of weights.

From the end of a forward to the next backward, step or forward, all groups register their sharded parameters, even if
they stay unsharded for backward: `parameters()` returns one kind of tensor, with the gradients that an optimizer uses.
torch refuses to combine a DTensor with a plain tensor, and treats a plain one-element tensor as equal on all ranks,
which a loss is not. During this time a DTensor combined with a plain tensor is replaced by its full value, and so is,
in a forward, a parameter used while its group is sharded (in a generator, or from an object with a reference to it).

`register_dtensor_handlers` handles operators that torch refuses for DTensors, or computes from the local tensor only.
"""

import contextlib
import functools
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.experimental import implicit_replication

from shardwise import compat
from shardwise.errors import ShardError
from shardwise.models.nested_tensors import change_tensors, find_tensors
from shardwise.sharding.hooks.parameter_writes import ShardUses, write_back
from shardwise.sharding.hooks.shard_views import (
    NoGradientError,
    compute_whole,
    reduce_partial,
    refuse_gradient,
    watch_views,
    write_whole,
)
from shardwise.sharding.inventory import full_tensor, local_part, local_tensor
from shardwise.sharding.registry import described, users_line


class WholeValue(torch.autograd.Function):
    """Full value of a DTensor for a computation on this rank; its gradient is averaged over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> torch.Tensor:
        """Gather the tensor.

        Ranks:
            Collective over the tensor's mesh.
        """
        ctx.like = tensor.detach()
        return full_tensor(ctx.like)  # pyrefly: ignore[bad-argument-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyrefly: ignore[bad-override]
        """Average the gradient, and shard it like the tensor."""
        like, mesh = ctx.like, ctx.like.device_mesh
        parts = DTensor.from_local(gradients[0] / mesh.size(), mesh, [Partial()] * mesh.ndim, run_check=False)
        mean = parts.full_tensor()
        if any(placement.is_partial() for placement in like.placements):
            return DTensor.from_local(mean, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return compat.dtensor_like(local_part(mean, like).contiguous(), like)


class OutsideTensor(DTensor):
    """Class of sharded parameters, and of DTensors computed from them, in code outside the model."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` on DTensors, or on full values if an argument is plain or DTensors do not support `func`."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "__get__":
            return _call(func, args, kwargs, args[:1])
        ShardUses.count += 1
        tensors = find_tensors((args, kwargs))
        is_mixed = not all(isinstance(tensor, DTensor) for tensor in tensors)
        if _is_in_place(name) and isinstance(tensors[0], DTensor):
            with implicit_replication() if is_mixed else contextlib.nullcontext():  # each rank writes its part
                return _call(func, args, kwargs, tensors)
        if not is_mixed or func in _BACKWARDS:
            try:
                return _call(func, args, kwargs, tensors)
            except (RuntimeError, NotImplementedError, NoGradientError) as error:
                # A rank that runs out of memory must not gather, because the other ranks do not.
                if func in _BACKWARDS or isinstance(error, torch.OutOfMemoryError):
                    raise
        if any(use.is_in_forward for use in _OPEN):
            warnings.warn(
                f"parameters used in forward while their group is sharded: {name}() gathers them for itself. Name the "
                "method that uses them in ShardConfig.entry_points, or the module in ShardConfig.overrides",
                stacklevel=2,
            )
        return func(*change_tensors(args, _whole), **change_tensors(kwargs, _whole))  # not supported by DTensors


_BACKWARDS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


def _is_in_place(name: str) -> bool:
    is_operator = name.startswith("__i") and name not in ("__int__", "__index__", "__invert__")
    return is_operator or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


@contextlib.contextmanager
def _as_dtensors(tensors: Iterable[Any]) -> Iterator[None]:
    outside = [tensor for tensor in tensors if type(tensor) is OutsideTensor]
    _set_class(outside, DTensor)
    try:
        yield
    finally:
        _set_class(outside if _OPEN else (), OutsideTensor)  # a backward may have ended outside use


def _set_class(tensors: Iterable[Any], kind: type[DTensor]) -> None:
    for tensor in tensors:
        tensor.__class__ = kind


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    with _as_dtensors([tensor]):
        return WholeValue.apply(tensor)


_COMPUTED: dict[int, weakref.ref[DTensor]] = {}
"""Tensors computed from parameters of the class above, by identity."""


def _call(func: Any, args: Any, kwargs: Any, tensors: Iterable[Any]) -> Any:
    """Call a function on DTensors; the results are OutsideTensors."""
    with _as_dtensors(tensors), compat.without_torch_functions():
        result = func(*args, **kwargs)
    for made in find_tensors(result) if _OPEN else ():
        if type(made) is DTensor:
            made.__class__, key = OutsideTensor, id(made)
            _COMPUTED[key] = weakref.ref(made, lambda _, key=key: _COMPUTED.pop(key, None))
    return result


_OPEN: weakref.WeakSet["OutsideUse"] = weakref.WeakSet()


class OutsideUse:
    """The parameters of one root, between its forward and the next backward, step or forward."""

    def __init__(self, groups: Iterable[Any], others: Iterable[Any]) -> None:
        """`others`: iterable over the current parameters outside all groups."""
        self.groups, self._others = tuple(groups), others
        self._parameters: list[Any] = []
        self._uses = 0
        self.is_in_forward = False

    def begin(self) -> None:
        """Register the sharded parameters."""
        self.is_in_forward = False
        for group in self.groups:
            if compat.is_unsharded(group):
                write_back(group)
                compat.show_shards(group)
        shards = [parameter for group in self.groups for parameter in compat.sharded_parameters(group)]
        self._parameters = [parameter for parameter in (*shards, *self._others) if type(parameter) is DTensor]
        _set_class(self._parameters, OutsideTensor)
        self._uses = ShardUses.count
        _OPEN.add(self)

    def begin_forward(self) -> None:
        """Allow forward code to use parameters of sharded groups."""
        shards = [parameter for group in self.groups for parameter in compat.sharded_parameters(group)]
        self._parameters = [parameter for parameter in shards if type(parameter) is DTensor]
        _set_class(self._parameters, OutsideTensor)
        self.is_in_forward = True
        _OPEN.add(self)

    def begin_again(self) -> None:
        """Begin after a backward, if another one follows."""
        if any(map(compat.is_unsharded, self.groups)):
            self.begin()

    def end(self) -> None:
        """Restore plain DTensors."""
        _set_class(self._parameters, DTensor)
        self._parameters, self.is_in_forward = [], False
        _OPEN.discard(self)
        if not _OPEN:
            living = [tensor for reference in _COMPUTED.values() if (tensor := reference()) is not None]
            _COMPUTED.clear()
            _set_class(living, DTensor)

    def reshard_used(self) -> None:
        """Reshard groups kept unsharded for a backward that did not run, if their shards may have been written."""
        if ShardUses.count != self._uses:
            for group in self.groups:
                if compat.is_unsharded(group):
                    compat.wait_and_reshard(group)


def end_outside_use() -> list[Callable[[], None]]:
    """End outside use for all models; return functions to resume it after a backward, possibly inside a forward."""
    ended = list(_OPEN)
    again = [use.begin_forward if use.is_in_forward else use.begin_again for use in ended]
    for use in ended:
        use.end()
    return again


_aten: Any = torch.ops.aten
_DRAW_IN_PLACE = (_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float)
_DRAW_LIKE = (_aten.rand_like.default, _aten.randn_like.default)
_OF_SEVERAL = (
    _aten.copy_.default, _aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor,
    _aten.lerp_.Scalar, _aten.lerp_.Tensor, _aten.addcmul_.default, _aten.addcdiv_.default, _aten.add.Tensor,
    _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.lerp.Scalar, _aten.mm.default, _aten.bmm.default,
    _aten.equal.default, _aten.maximum.default, _aten.minimum.default, _aten.where.self,
)  # fmt: skip
"""Operators on weights and averages of weights, with plain tensors and DTensors."""
_OF_WHOLE = (_aten.index.Tensor, _aten._unique2.default)
"""Operators that torch refuses for some arguments, such as masks, in addition to those without a sharding strategy."""


@functools.cache
def register_dtensor_handlers() -> None:
    """Register handlers of operators on DTensors, for the rest of this process."""
    for operator in (*compat.operators_without_strategy(), *_OF_WHOLE):
        answer = write_whole if operator._schema.is_mutable else compute_whole
        compat.answer_operator(operator, functools.partial(answer, operator))
    for operator in compat.in_place_operators():
        if operator not in _OF_SEVERAL:  # their handler reduces itself: optimizers call them for each parameter
            compat.answer_operator(operator, functools.partial(_write_in_place, operator))
    compat.answer_operator(_aten._local_scalar_dense.default, _item)
    compat.answer_operator(_aten.index_put_.default, _write_masked)
    compat.answer_operator(_aten.eye.m_out, _eye)
    for operator in (*_DRAW_IN_PLACE, *_DRAW_LIKE):
        compat.answer_operator(operator, functools.partial(_draw, operator))
    for operator in _OF_SEVERAL:
        compat.answer_operator(operator, functools.partial(_meet_plain, operator, operator._schema.is_mutable))
    watch_views()
    for name, method in (("data_ptr", _data_ptr), ("__format__", _format)):
        setattr(DTensor, name, method)
    for name in ("numpy", "tolist", "storage"):  # safetensors asks for the storage
        setattr(DTensor, name, functools.partialmethod(_refuse_export, name))


def _meet_plain(operator: Any, is_written: bool, plain: Callable[[], Any], args: Any, kwargs: Any) -> Any:
    """Combine a DTensor and a plain tensor, which torch refuses: write this rank's part, or compute with full values.

    Ranks:
        Collective if the result is plain, or if a partial value is written to.
    """
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    first, others = tensors[0], tensors[1:]
    if is_written:
        reduce_partial(first)
        if type(first) is DTensor and all(_is_scalar_or_like(first, each) for each in others):
            # Optimizers use this for each parameter; a second dispatch would be slower.
            operator(*map(_local, args), **{name: _local(value) for name, value in kwargs.items()})
            return first

    def is_alike(tensor: torch.Tensor) -> bool:
        return isinstance(tensor, DTensor) and (
            not is_written or tensor.placements == getattr(first, "placements", None)
        )

    is_plain = not isinstance(first, DTensor) and (is_written or first.ndim > 0)
    if not is_plain and all(each.ndim == 0 or is_alike(each) for each in others):
        return plain()
    if compat.replicates_implicitly() or compat.in_backward() or not any(type(each) is DTensor for each in tensors):
        return plain()
    why = "the plain tensor may differ between the ranks, so that torch knows no gradient of this"
    refuse_gradient(f"{operator} of {described(tensors)} and a plain tensor", tensors, why)
    if not (is_written and isinstance(first, DTensor)):
        return operator(*change_tensors(args, _plain), **change_tensors(kwargs, _plain))

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if is_alike(tensor) and tensor.shape == first.shape:
            return local_tensor(tensor)
        whole = _plain(tensor).to(first.device_mesh.device_type)
        return whole if whole.ndim == 0 else local_part(whole.expand(first.shape), first)

    operator(*change_tensors(args, own), **change_tensors(kwargs, own))
    return first


def _is_scalar_or_like(first: DTensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain scalar, or a DTensor with the shape and placements of `first`."""
    if type(tensor) is DTensor:
        return compat.spec_of(tensor) == compat.spec_of(first)
    return type(tensor) is torch.Tensor and tensor.ndim == 0


def _local(value: Any) -> Any:
    return local_tensor(value) if isinstance(value, DTensor) else value


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full value of a tensor. Collective if it is sharded."""
    return full_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def _data_ptr(tensor: DTensor) -> int:
    """Return the address of this rank's part; torch needs its own value, 0, but other code would treat all as tied."""
    if sys._getframe(1).f_globals["__name__"].startswith("torch."):
        return 0
    local = local_tensor(tensor)  # if it is empty, its own address is 0
    return local.data_ptr() or local.untyped_storage().data_ptr() or compat.storage_id(local)


def _format(tensor: DTensor, spec: str) -> str:
    return format(tensor.item() if spec and tensor.ndim == 0 else str(tensor), spec)


def _refuse_export(tensor: DTensor, name: str, *_: Any, **__: Any) -> None:
    raise ShardError(
        f".{name}() of {described([tensor])}",
        where=users_line(),
        why="this rank has a part of it, and gathering the rest needs all ranks",
        fix="tensor.full_tensor() on all ranks first; shardwise.save_weights(model, folder) writes safetensors, and "
        "shardwise.full_params(model) shows whole parameters",
    )


def _item(plain: Callable[[], Any], args: Any, kwargs: Any) -> Any:
    """Handle `.item()` of a norm or sum, for which torch returns this rank's term instead of the reduced value.

    Some programs sum the terms over ranks themselves, others do not, and some call it on one rank only. torch's own
    code, such as its optimizers, calls it on all ranks and expects the full value.

    Ranks:
        Collective if the value is sharded or partial.
    """
    tensor = args[0]
    if all(placement.is_replicate() for placement in tensor.placements):
        return plain()
    kinds = [placement for placement in tensor.placements if placement.is_partial()]
    is_term = (
        any(kind.is_partial("sum") or "Norm" in type(kind).__name__ for kind in kinds) and tensor.dtype != torch.bool
    )
    if is_term and not _is_asked_by_torch():
        raise ShardError(
            ".item() of a norm or a sum over a sharded tensor",
            where=users_line(),
            why="each rank has a term of it; code that all-reduces the result needs that, other code the full value",
            fix="call .full_tensor().item() on all ranks, and do not all-reduce the result; sw.clip_grad_norm_ returns "
            "the norm of all gradients",
        )
    return tensor.full_tensor().item()


def _is_asked_by_torch() -> bool:
    """Whether the first caller outside DTensor's own code is in torch."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("shardwise.", "torch.distributed.tensor", "torch._")):
            return name.startswith("torch.")
        frame = frame.f_back
    return False


def _write_masked(plain: Callable[[], Any], args: Any, kwargs: Any) -> Any:
    """`tensor[mask] = value`, not supported by torch: a mask sharded like the tensor is applied to each part.

    Ranks:
        Collective unless the mask is sharded like the tensor.
    """
    tensor, indices, value, *rest = args
    if all(each.is_replicate() for part in (tensor, *indices, value) for each in getattr(part, "placements", ())):
        local = [index if index is None else local_tensor(index) for index in indices]
        local_tensor(tensor).index_put_(local, local_tensor(value), *rest, **kwargs)
        return tensor  # the mask of a scalar, which torch converted to plain indices
    mask = indices[0] if len(indices) == 1 else None
    is_laid_out_alike = isinstance(mask, DTensor) and mask.dtype == torch.bool and mask.placements == tensor.placements
    if mask is None or not is_laid_out_alike or mask.shape != tensor.shape or value.numel() != 1:
        return write_whole(_aten.index_put_.default, plain, args, kwargs)
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    local_tensor(tensor).index_put_([local_tensor(mask)], whole, *rest, **kwargs)
    return tensor


def _write_in_place(operator: Any, plain: Callable[[], Any], args: Any, kwargs: Any) -> Any:
    """Write with DTensors; on the full value if torch would need other placements, as for `triu_` from 2.14 on."""
    reduce_partial(args[0])
    try:
        return plain()
    except RuntimeError as error:
        changes_shape = torch.Tag.inplace_view in operator.tags
        if changes_shape or not re.search("placement changes|mixed torch.Tensor", str(error)):
            raise
        return write_whole(operator, plain, args, kwargs)


def _eye(plain: Callable[[], Any], args: Any, kwargs: Any) -> Any:
    """`nn.init.eye_`: torch treats every rank's part as the full matrix."""
    tensor = kwargs["out"]
    local_tensor(tensor).copy_(local_part(torch.eye(*tensor.shape, dtype=tensor.dtype, device=tensor.device), tensor))
    return tensor


def _draw(operator: Any, plain: Callable[[], Any], args: Any, kwargs: Any) -> Any:
    """Random numbers on CPUs: with equal generator states, all ranks would draw the same numbers for their parts."""
    tensor = args[0]
    local = local_tensor(tensor)
    if local.device.type != "cpu" or all(placement.is_replicate() for placement in tensor.placements):
        return plain()
    whole = operator(torch.empty(tensor.shape, dtype=kwargs.get("dtype") or local.dtype), *args[1:], **kwargs)
    if operator in _DRAW_LIKE:
        return compat.dtensor_like(local_part(whole, tensor).contiguous(), tensor)
    local.copy_(local_part(whole, tensor))
    return tensor
