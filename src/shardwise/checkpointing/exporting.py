"""A sharded model's weights as files that everybody reads: gathered a bucket at a time, written by the first rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.checkpointing.agreeing.together import is_first, mesh_of_model, on_first, raise_over, together
from shardwise.checkpointing.contents import ITEM_BYTES
from shardwise.checkpointing.formats.detect import TORCH_SUFFIXES
from shardwise.checkpointing.formats.full_writing import FullWriter, tensors_in
from shardwise.checkpointing.formats.safetensors_writing import DEFAULT_SHARD_BYTES, SafetensorsWriter, distribute
from shardwise.checkpointing.formats.tensor_info import TensorInfo
from shardwise.checkpointing.hugging_face.expectations import companions_of, weights_stem
from shardwise.checkpointing.loading.unusable import refuse_unusable
from shardwise.checkpointing.state.slices import ModelTensor, dtype_name, model_tensors
from shardwise.checkpointing.storage.byte_progress import counting
from shardwise.checkpointing.storage.files import is_remote
from shardwise.checkpointing.storage.memory import bytes_of, give_back_freed
from shardwise.errors import CheckpointError, ConfigError
from shardwise.progress import Progress
from shardwise.sharding.gathering import gather_in_buckets, in_first_rank_order
from shardwise.sharding.inventory import is_meta
from shardwise.units import parse_bytes

_BUCKET_BYTES = 32 << 20
_TRIM_BYTES = 64 << 20

Put = Callable[[TensorInfo, memoryview], None]


def save_weights(
    model: nn.Module,
    path: str | Path,
    format: Literal["safetensors", "torch"] = "safetensors",
    dtype: torch.dtype | str | None = None,
    *,
    max_shard_bytes: int | str | None = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write the full, unsharded weights: parameters and persistent buffers, under the names of the unsharded model.

    Tensors are gathered a bucket at a time and written as they come, so that no rank holds the model. A tied
    tensor is written once (`torch`: under each of its names, sharing memory). The files appear when they are whole.

    Args:
        model: Sharded by shardwise or by hand, or not at all.
        path: For safetensors a file `x.safetensors`, or a folder that transformers and diffusers can open: weights,
            index, and the model's config where it has one. For torch a file, as in `weights.pt`.
        format: `safetensors`, or `torch` for a state dict that `torch.load(weights_only=True)` reads.
        dtype: Cast floating-point tensors to it, as in `bfloat16`.
        max_shard_bytes: Of tensors in one file of a folder, as in `"2GB"`; None: all in one.
        overwrite: Replace weights that are there already.
        progress: Is told the bytes that are written.

    Raises:
        ConfigError: The format or dtype does not exist, or the path ends as files of the other format do.
        CheckpointError: The weights cannot be written, or the model has no values, or corrupt ones.

    Ranks:
        Collective over the ranks that hold the model; the first writes. Every rank raises.
    """
    mesh = mesh_of_model(model)
    tensors = together(lambda: _check(model, path, format), mesh)
    target = _dtype(dtype)
    infos = [_info(tensor, target) for tensor in tensors]
    if format == "torch":
        tree = {name: info for tensor, info in zip(tensors, infos, strict=True) for name in tensor.names}
        order = tensors_in(tree)

        def open_writer(stack: ExitStack) -> Put:
            return stack.enter_context(FullWriter(Path(path), tree, overwrite=overwrite)).write
    else:
        limit = _limit(max_shard_bytes)
        order = [info for shard in distribute(infos, Path(path), limit) for info in shard]

        def open_writer(stack: ExitStack) -> Put:
            companions = companions_of(model, target) if not str(path).endswith(".safetensors") else {}
            writer = SafetensorsWriter(
                Path(path),
                infos,
                max_shard_bytes=limit,
                stem=weights_stem(model),
                companions=companions,
                overwrite=overwrite,
            )
            stack.enter_context(writer)
            return lambda info, data: writer.write(info.name, data)

    by_name = {tensor.name: tensor.tensor for tensor in tensors}
    stream_gathered([(info, by_name[info.name]) for info in order], open_writer, mesh, progress)


def stream_gathered(
    named: Sequence[tuple[TensorInfo, torch.Tensor]],
    open_writer: Callable[[ExitStack], Put],
    mesh: DeviceMesh | None,
    progress: Progress | None = None,
) -> None:
    """Gather tensors one bucket after another and hand the first rank their bytes, in the order given.

    Args:
        named: What to write, cast to the dtype that the info says, in the order of the first rank's file; other ranks
            may have another order.
        open_writer: Called on the first rank with a stack to enter; returns what takes the bytes.
        mesh: The ranks that hold the tensors.
        progress: Is told the bytes.

    Raises:
        CheckpointError: The writer failed, or a rank lacks a sharded tensor; on every rank.

    Ranks:
        Collective over the mesh.
    """
    named = _in_first_rank_order(named, mesh)
    writes, error, passed = is_first(mesh), None, 0
    with ExitStack() as stack:
        put: list[Put] = []
        on_first(lambda: put.append(open_writer(stack)), mesh)  # before anything is gathered
        total = sum(info.num_bytes for info, _ in named)
        count = stack.enter_context(counting(progress if writes else None, total, "saving"))
        for info, data in _bytes_of_all(named, writes):
            passed += info.num_bytes
            if passed >= _TRIM_BYTES:
                passed = 0
                give_back_freed()
            if data is None or error is not None:
                continue  # the others are still gathering: this rank takes part to the end
            try:
                put[0](info, data)
            except Exception as caught:
                error = caught
            count(info.num_bytes)
        if error is not None:
            _leave(stack, error)
        elif writes:
            error = _leave(stack, None)
    raise_over(mesh, error)


def _in_first_rank_order(
    named: Sequence[tuple[TensorInfo, torch.Tensor]], mesh: DeviceMesh | None
) -> Sequence[tuple[TensorInfo, torch.Tensor]]:
    ordered = in_first_rank_order([(info.name, tensor) for info, tensor in named], mesh)
    infos = {info.name: info for info, _ in named}
    return [
        (infos.get(name) or TensorInfo(name, dtype_name(tensor.dtype), tuple(tensor.shape)), tensor)
        for name, tensor in ordered
    ]


def _leave(stack: ExitStack, error: Exception | None) -> Exception | None:
    """Commit, or clean up after an error; what goes wrong in that is returned, not raised: others are waiting."""
    try:
        if error is None:
            stack.close()
        else:
            stack.__exit__(type(error), error, error.__traceback__)
    except Exception as caught:
        return caught
    return error


def _bytes_of_all(
    named: Sequence[tuple[TensorInfo, torch.Tensor]], keep: bool
) -> Iterable[tuple[TensorInfo, memoryview | None]]:
    # Runs of one dtype: the cast happens before the tensors travel.
    start = 0
    while start < len(named):
        end = start
        while end < len(named) and named[end][0].dtype == named[start][0].dtype:
            end += 1
        dtype = getattr(torch, named[start][0].dtype)
        pairs = ((info.name, tensor.detach()) for info, tensor in named[start:end])
        gathered = gather_in_buckets(pairs, bucket_bytes=_BUCKET_BYTES, dtype=dtype, keep=keep)
        for (info, _), (_, full) in zip(named[start:end], gathered, strict=True):
            yield info, None if full is None else bytes_of(full.to("cpu").contiguous())
        start = end


def _check(model: nn.Module, path: str | Path, format: str) -> list[ModelTensor]:
    if format not in ("safetensors", "torch"):
        raise ConfigError(
            f"format is {format!r}",
            where="save_weights(format=...)",
            fix='pass "safetensors" or "torch"; for sharded checkpoints use shardwise.Checkpointer',
        )
    if str(path).endswith(TORCH_SUFFIXES if format == "safetensors" else ".safetensors"):
        fixes = {
            "safetensors": 'pass format="torch", or name a folder or a file that ends in .safetensors',
            "torch": 'pass format="safetensors", or name a file that ends in .pt',
        }
        raise ConfigError(
            f"format is {format!r}, but the path ends in {Path(path).suffix}",
            where=str(path),
            why="programs that read weights go by the ending",
            fix=fixes[format],
        )
    refuse_remote(path)
    refuse_unusable(model)
    tensors = model_tensors(model)
    empty = [tensor.name for tensor in tensors if is_meta(tensor.tensor)]
    if empty:
        raise CheckpointError(
            f"{len(empty)} tensors have no values to save",
            where=", ".join(empty[:5]),
            why="they are on the meta device",
            fix="shardwise.materialize(model), or shardwise.load_weights(model, path)",
        )
    return tensors


def refuse_remote(path: str | Path) -> None:
    """Raise for a URL: single files are written on a local disk only.

    Ranks:
        Local.
    """
    if is_remote(path):
        raise CheckpointError(
            "weights are written to a local disk only",
            where=str(path),
            why="a file gets its name when it is whole, by a rename, which object stores do not have",
            fix="save to a local folder and upload that; Checkpointer writes to object stores",
        )


def _info(tensor: ModelTensor, dtype: torch.dtype | None) -> TensorInfo:
    is_cast = dtype is not None and tensor.tensor.is_floating_point()
    return TensorInfo(tensor.name, dtype_name(dtype) if is_cast else tensor.dtype, tensor.shape)


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    name = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16"}.get(dtype, dtype)
    name = name.removeprefix("torch.")
    if name not in ITEM_BYTES or not getattr(torch, name).is_floating_point:
        raise ConfigError(
            f"dtype is {dtype!r}",
            where="save_weights(dtype=...)",
            why="floating-point tensors are cast to it",
            fix="pass one such as torch.bfloat16 or 'float32'",
        )
    return getattr(torch, name)


def _limit(max_shard_bytes: int | str | None) -> int | None:
    try:
        limit = None if max_shard_bytes is None else parse_bytes(max_shard_bytes)
        if limit is not None and limit < 1:
            raise ValueError(f"max_shard_bytes is {limit}")
    except ValueError as error:
        raise ConfigError(str(error), where="save_weights(max_shard_bytes=...)", fix="pass e.g. '5GB'") from None
    return limit
