"""Settings of a group: dtypes, resharding, offload."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.config.load import check_ranges
from shardwise.config.schema import SHARD_AXES, GroupOverride, PrecisionConfig, ShardConfig
from shardwise.errors import PlanError
from shardwise.planning.plan import DTYPE_BYTES

FLOATING = ("float64", "float32", "bfloat16", "float16")
SIXTEEN_BIT = ("bfloat16", "float16")
BF16_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class Compute:
    """Dtype of unsharded parameters; None is the storage dtype."""

    dtype: str | None
    reason: str
    grad_scaler: bool = False


def choose_compute(
    precision: PrecisionConfig, device: str, capability: tuple[int, int] | None, storage: Sequence[str]
) -> Compute:
    """Choose the compute dtype of a model with trainable parameters of these `storage` dtypes.

    Args:
        precision: Precision settings.
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
    """Choose the dtype for gradient reduction: 32 bits, because 16 bits lose small contributions of many ranks."""
    if precision.reduce_dtype == "storage":
        return None  # FSDP2 reduces gradients in their own dtype
    if precision.reduce_dtype != "auto":
        return precision.reduce_dtype
    if storage and all(dtype not in FLOATING for dtype in storage):
        return None  # complex gradients have no wider real dtype
    return "float64" if "float64" in storage else "float32"


def majority(dtypes: Sequence[tuple[str, int]]) -> str:
    """Return the dtype with the most elements among `(dtype, numel)` pairs; the wider one in a tie."""
    counts: Counter[str] = Counter()
    for dtype, numel in dtypes:
        counts[dtype] += numel
    return max(counts, key=lambda dtype: (counts[dtype], DTYPE_BYTES.get(dtype, 0)))


def widest(dtypes: Sequence[str]) -> str:
    """Return the narrowest dtype that can represent all of these."""
    if set(dtypes) == set(SIXTEEN_BIT):
        return "float32"
    return max(dtypes, key=lambda dtype: DTYPE_BYTES.get(dtype, 0))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def group_settings(
    config: ShardConfig, overrides: Iterable[GroupOverride], compute: Compute, storage: Sequence[str], *, is_root: bool
) -> dict[str, Any]:
    """Return fields of `Group` for a group with trainable parameters of these `storage` dtypes.

    `forward_prefetch` and `backward_prefetch` are numbers of groups.
    """
    reshard = config.reshard_after_forward
    if is_root and (reshard is None or not isinstance(reshard, bool)):
        reshard = False  # an int keeps parameters on fewer ranks until backward, but backward starts with the root
    settings: dict[str, Any] = {
        "param_dtype": compute.dtype,
        "reduce_dtype": choose_reduce(config.precision, storage),
        "output_dtype": config.precision.output_dtype if is_root else None,
        "cast_inputs": config.precision.cast_inputs,
        "reshard_after_forward": True if reshard is None else reshard,
        "offload": config.offload,
        "forward_prefetch": config.prefetch.forward,
        "backward_prefetch": config.prefetch.backward,
    }
    for override in overrides:
        settings |= {name: value for name in settings if (value := getattr(override, name)) is not None}
    if settings["param_dtype"] == "storage":
        settings["param_dtype"] = None
    if storage and all(dtype not in FLOATING for dtype in storage):  # complex numbers have no 16-bit compute dtype
        settings |= {"param_dtype": None, "reduce_dtype": None, "cast_inputs": False}
    pin_memory = torch.accelerator.is_available() if config.pin_memory is None else config.pin_memory
    return settings | {"pin_memory": settings["offload"] and pin_memory}


def check_config(config: ShardConfig, axes: dict[str, int]) -> None:
    """Raise for settings that this mesh does not support.

    Raises:
        PlanError: An int `reshard_after_forward` that does not divide the shard axis, or with a tensor axis.
        ConfigError: A negative prefetch.
    """
    num_shards = math.prod(axes.get(axis, 1) for axis in SHARD_AXES)
    asked = [("reshard_after_forward", config.reshard_after_forward)]
    asked += [(f"overrides: {o.pattern}.reshard_after_forward", o.reshard_after_forward) for o in config.overrides]
    for where, value in asked:
        if value is None or isinstance(value, bool):
            continue
        if "tensor" in axes:
            raise PlanError(
                f"reshard_after_forward = {value} is not supported with a tensor axis",
                where=where,
                why="torch cannot reshard parameters to fewer ranks if they are also split over another axis",
                fix="choose True or False",
            )
        if value < 2 or num_shards % value:
            factors = [n for n in range(2, num_shards + 1) if num_shards % n == 0]
            raise PlanError(
                f"reshard_after_forward = {value} does not fit a shard axis of {num_shards} ranks",
                where=where,
                why="parameters are resharded to that number of ranks until backward, so it must divide the axis",
                fix=f"choose one of {factors}, True or False" if factors else "use True or False on this mesh",
            )
    check_ranges(config.prefetch, "prefetch")
