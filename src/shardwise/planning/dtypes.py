"""Choose dtypes: what hardware computes well, how gradients are reduced, how mixed storage is split."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.config.schema import PrecisionConfig
from shardwise.planning.plan import DTYPE_BYTES

FLOATING = ("float64", "float32", "bfloat16", "float16")
SIXTEEN_BIT = ("bfloat16", "float16")
BF16_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class Compute:
    """The dtype parameters are gathered in; None is the dtype they are stored in."""

    dtype: str | None
    reason: str
    grad_scaler: bool = False


def choose_compute(
    precision: PrecisionConfig, device: str, capability: tuple[int, int] | None, storage: Sequence[str]
) -> Compute:
    """The compute dtype for a model whose trainable parameters are stored in `storage` dtypes.

    Args:
        precision: What the user asked for.
        device: Device type of the mesh.
        capability: CUDA compute capability, None for other devices.
        storage: Dtypes of the floating-point parameters.
    """
    asked = precision.param_dtype
    if asked == "storage":
        return Compute(None, "computes in the dtype parameters are stored in, as asked")
    if asked != "auto":
        return Compute(asked, f"computes in {asked}, as asked", grad_scaler=asked == "float16")
    if device == "cpu":
        return Compute(None, "computes in the stored dtype: 16-bit matrix products are slow on CPUs")
    if set(storage) - {"float32"}:
        mix = "/".join(sorted(set(storage)))
        return Compute(None, f"computes in the stored dtypes ({mix}), which the model chose itself")
    if device != "cuda" or capability is None or capability >= BF16_CAPABILITY:
        return Compute("bfloat16", "computes in bfloat16: same range as float32, no loss scaling needed")
    major, minor = capability
    return Compute("float16", f"computes in float16: sm{major}{minor} has no fast bfloat16; use a GradScaler", True)


def choose_reduce(precision: PrecisionConfig, storage: Sequence[str]) -> str | None:
    """The dtype gradients are summed in: 32 bits, because 16 lose small contributions of many ranks."""
    if precision.reduce_dtype == "storage":
        return None  # FSDP2 sums gradients in the dtype they come in
    if precision.reduce_dtype != "auto":
        return precision.reduce_dtype
    if any(dtype not in FLOATING for dtype in storage):
        return None  # complex gradients have no wider real dtype
    return "float64" if "float64" in storage else "float32"


def majority(dtypes: Sequence[tuple[str, int]]) -> str:
    """The dtype that holds most elements, among `(dtype, numel)` pairs; ties go to the wider."""
    counts: Counter[str] = Counter()
    for dtype, numel in dtypes:
        counts[dtype] += numel
    return max(counts, key=lambda dtype: (counts[dtype], DTYPE_BYTES.get(dtype, 0)))


def widest(dtypes: Sequence[str]) -> str:
    """The dtype that can hold all the others."""
    if set(dtypes) == set(SIXTEEN_BIT):
        return "float32"
    return max(dtypes, key=lambda dtype: DTYPE_BYTES.get(dtype, 0))


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` as `float32`."""
    return str(dtype).removeprefix("torch.")
