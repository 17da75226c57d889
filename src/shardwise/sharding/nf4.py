"""NF4: frozen matrices with 4 bits per element, as in QLoRA, sharded and all-gathered in this form."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise import compat
from shardwise.errors import ShardError
from shardwise.models.nested_tensors import change_tensors

BLOCK = 64
"""Number of elements of a row that share a scale."""
_MAX_ELEMENTS = 1 << 24  # quantized at once: each needs about 20 bytes of temporary memory
# Quantiles of a normal distribution that QLoRA quantizes to (Dettmers et al. 2023, appendix E).
_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class NF4Tensor(torch.Tensor):
    """A matrix of `dtype` with 4 bits per element, and a scale in `dtype` for every 64 elements of a row.

    Operators use its dequantized values; written values are quantized. Rows are quantized independently, so that a
    slice of rows has the same bits as in the full matrix. Quantizing the values again gives the same bits.

    Args:
        codes: Two elements per byte, the first in the high bits; (rows, columns / 2).
        scales: (rows, columns / 64), in the dtype of the values.
        shape: Shape of the values, if not (rows, columns).
    """

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, shape: tuple[int, ...] | None = None) -> NF4Tensor:
        """Create the wrapper of the inner tensors."""
        shape = (codes.shape[0], codes.shape[1] * 2) if shape is None else shape
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=scales.dtype, device=codes.device)  # fmt: skip

    def __init__(self, codes: Tensor, scales: Tensor, shape: tuple[int, ...] | None = None) -> None:
        self.codes, self.scales = codes, scales

    def dequantize(self) -> Tensor:
        """Return the values as a plain tensor."""
        return _values(self.codes, self.scales, self.dtype).view(self.shape)

    def requires_grad_(self, mode: bool = True) -> NF4Tensor:
        """Accept False only: the matrix is frozen.

        Raises:
            ShardError: `mode` is True.
        """
        if mode:
            raise ShardError(
                "an NF4 parameter requires gradients",
                where="an NF4 parameter",
                why="its elements have only 16 values: optimizer updates would be rounded away",
                fix="freeze it and train adapters, or build the model without quantize='nf4'",
            )
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:  # pyrefly: ignore[bad-override]
        return f"NF4Tensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[int, ...]]:
        return ["codes", "scales"], tuple(self.shape)

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], shape: tuple[int, ...], *_unused: object) -> NF4Tensor:
        return NF4Tensor(inner["codes"], inner["scales"], shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # pyrefly: ignore[bad-override]
        kwargs = kwargs or {}
        if (handler := _HANDLERS.get(func)) is not None:
            return handler(func, *args, **kwargs)
        dense: dict[int, Tensor] = {}

        def values(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, cls):
                return tensor
            if id(tensor) not in dense:
                dense[id(tensor)] = tensor.dequantize()
            return dense[id(tensor)]

        plain_args, plain_kwargs = change_tensors((args, kwargs), values)
        result = func(*plain_args, **plain_kwargs)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if isinstance(value, cls) and argument.alias_info is not None and argument.alias_info.is_write:
                _write(value, dense[id(value)])  # quantize values written by `normal_` and similar operators
                return value
        return result

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, Tensor], None]:
        """Return the tensors that FSDP2 all-gathers: 4.5 bits per element with float32 scales."""
        return (self.codes, self.scales), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, Tensor], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        """Return the unsharded parameter: a plain tensor of `param_dtype`, freed when the group is resharded."""
        codes, scales = outputs
        if out is None:
            values = _values(codes, scales, param_dtype)
            return values, (values,)
        with compat.preserved_version(out):
            out.copy_(_values(codes, scales, param_dtype))
        return None


def quantize_nf4(values: Tensor) -> NF4Tensor:
    """Quantize a matrix.

    Args:
        values: (rows, columns), columns a multiple of 64; on any device, including meta.
    """
    rows, columns = values.shape
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=values.device)
    scales = torch.empty(rows, columns // BLOCK, dtype=values.dtype, device=values.device)
    quantized = NF4Tensor(codes, scales)
    if not values.is_meta:
        _write(quantized, values)
    return quantized


def why_not_nf4(values: Tensor) -> str:
    """Return why a weight cannot be stored in NF4; empty if it can."""
    if values.ndim != 2 or not values.is_floating_point():
        return "not a matrix of floating-point numbers"
    return f"{values.shape[1]} columns are not a multiple of {BLOCK}" if values.shape[1] % BLOCK else ""


@torch.no_grad()
def _write(target: NF4Tensor, values: Tensor) -> None:
    """Quantize `values` into the memory of `target`."""
    rows, columns = target.codes.shape[0], target.codes.shape[1] * 2
    values = values.detach().reshape(rows, columns)
    count = max(_MAX_ELEMENTS // max(columns, 1), 1)
    for start in range(0, rows, count):
        part = slice(start, start + count)
        blocks = values[part].to(target.device, torch.float32).unflatten(1, (-1, BLOCK))
        # Divide by the scale as stored, after rounding: the values then quantize to the same bits again.
        scales = blocks.abs().amax(dim=2).to(target.dtype)
        divisors = torch.where(scales == 0, 1, scales).unsqueeze(2)
        codes = torch.bucketize(blocks / divisors, _midpoints(target.device), out_int32=True).to(torch.uint8)
        pairs = codes.view(-1, columns // 2, 2)
        target.codes[part] = pairs[..., 0] << 4 | pairs[..., 1]
        target.scales[part] = scales


def _values(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Look up two levels per byte in a table and apply the scales; (rows, columns)."""
    pairs = torch.embedding(_pairs(codes.device, dtype), codes.int())
    scaled = pairs.view(*scales.shape, BLOCK).mul_(scales.to(dtype).unsqueeze(-1))
    return scaled.view(codes.shape[0], codes.shape[1] * 2)


@functools.cache
def _pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the two levels of each of the 256 byte values."""
    levels = torch.tensor(_LEVELS, dtype=dtype, device=device)
    return torch.cartesian_prod(levels, levels)


@functools.cache
def _midpoints(device: torch.device) -> Tensor:
    levels = torch.tensor(_LEVELS, device=device)
    return (levels[1:] + levels[:-1]) / 2


def _on_inner(func: Any, tensor: NF4Tensor, *args: Any, **kwargs: Any) -> NF4Tensor:
    """Apply operators on memory, not values."""
    return NF4Tensor(func(tensor.codes, *args, **kwargs), func(tensor.scales, *args, **kwargs), tuple(tensor.shape))


def _slice(func: Any, tensor: NF4Tensor, dim: int = 0, *bounds: Any) -> Tensor:
    if dim != 0 or tensor.ndim != 2 or (len(bounds) > 2 and bounds[2] != 1):
        return func(tensor.dequantize(), dim, *bounds)
    return NF4Tensor(func(tensor.codes, 0, *bounds), func(tensor.scales, 0, *bounds))


def _split(func: Any, tensor: NF4Tensor, sizes: Any, dim: int = 0) -> list[Tensor]:
    if dim != 0 or tensor.ndim != 2:
        return func(tensor.dequantize(), sizes, dim)
    parts = zip(func(tensor.codes, sizes), func(tensor.scales, sizes), strict=True)
    return [NF4Tensor(codes, scales) for codes, scales in parts]


def _new(func: Any, tensor: NF4Tensor, size: list[int], **options: Any) -> Tensor:
    """Create an NF4 matrix for the same number of columns, as for FSDP2's shards; other tensors are plain."""
    columns = tensor.codes.shape[1] * 2
    if len(size) != 2 or size[1] != columns or options.get("dtype") not in (None, tensor.dtype):
        return func(tensor.scales, size, **options)
    options.pop("dtype", None)
    codes = func(tensor.codes, [size[0], columns // 2], **options)
    return NF4Tensor(codes, func(tensor.scales, [size[0], columns // BLOCK], **options))


def _view(func: Any, tensor: NF4Tensor, size: list[int], *args: Any, **kwargs: Any) -> Tensor:
    """View as flat, as FSDP2 stores its shards, or with the same rows; other views are views of the values."""
    rows, columns = tensor.codes.shape[0], tensor.codes.shape[1] * 2
    if list(size) in ([-1], [rows * columns], [rows, columns]):
        return NF4Tensor(tensor.codes, tensor.scales, (rows, columns) if len(size) == 2 else (rows * columns,))
    return func(tensor.dequantize(), size, *args, **kwargs)


def _to_copy(func: Any, tensor: NF4Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> NF4Tensor:
    scales = func(tensor.scales, dtype=dtype, **options)
    return NF4Tensor(func(tensor.codes, **options), scales, tuple(tensor.shape))


def _empty_like(func: Any, tensor: NF4Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    if dtype not in (None, tensor.dtype):
        return torch.empty(tensor.shape, dtype=dtype, device=options.get("device") or tensor.device)
    return _on_inner(func, tensor, **options)


def _copy(func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, NF4Tensor):
        assert isinstance(source, NF4Tensor)
        return func(target, source.dequantize(), non_blocking)
    if isinstance(source, NF4Tensor) and source.dtype == target.dtype:
        func(target.codes, source.codes, non_blocking)
        func(target.scales, source.scales, non_blocking)
    else:
        _write(target, source.dequantize() if isinstance(source, NF4Tensor) else source)
    return target


_ATEN = torch.ops.aten
_HANDLERS: dict[Any, Callable[..., Any]] = {
    _ATEN.detach.default: _on_inner,
    _ATEN.alias.default: _on_inner,
    _ATEN.clone.default: _on_inner,
    _ATEN._pin_memory.default: _on_inner,
    _ATEN.empty_like.default: _empty_like,
    _ATEN.slice.Tensor: _slice,
    _ATEN.split.Tensor: _split,
    _ATEN.split_with_sizes.default: _split,
    _ATEN.new_zeros.default: _new,
    _ATEN.new_empty.default: _new,
    _ATEN.view.default: _view,
    _ATEN.as_strided.default: _view,
    _ATEN._to_copy.default: _to_copy,
    _ATEN.copy_.default: _copy,
    _ATEN.is_pinned.default: lambda func, tensor, *args: func(tensor.codes, *args),
}
