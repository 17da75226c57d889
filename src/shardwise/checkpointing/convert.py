"""Turn a checkpoint of any format into another, a part of a tensor at a time, without a model or a process group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shardwise.checkpointing.contents import ITEM_BYTES, Contents
from shardwise.checkpointing.copying import copied_bytes, copy_to_dcp, copy_to_full, copy_to_safetensors
from shardwise.checkpointing.exporting import refuse_remote
from shardwise.checkpointing.formats.detect import open_checkpoint, require_names
from shardwise.checkpointing.formats.safetensors_writing import DEFAULT_SHARD_BYTES, SafetensorsWriter
from shardwise.checkpointing.formats.tensor_info import TensorInfo
from shardwise.checkpointing.hugging_face.companions import read_companions
from shardwise.checkpointing.pickles.record_checks import refuse_damaged
from shardwise.checkpointing.soundness import refuse_unsound
from shardwise.checkpointing.state.sections import only_model, with_our_names
from shardwise.checkpointing.storage import files
from shardwise.errors import ConfigError
from shardwise.progress import NoProgress, Progress

if TYPE_CHECKING:
    import torch
    from torch import nn

Format = Literal["dcp", "full", "safetensors"]
_FLOATS = tuple(name for name in ITEM_BYTES if name.startswith(("float", "bfloat")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What a conversion wrote."""

    path: files.Place
    format: Format
    source_format: str
    num_tensors: int
    num_bytes: int
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Names that the new checkpoint does not have, each with the reason."""


def convert_checkpoint(
    src: str | Path,
    dst: str | Path,
    format: Format = "dcp",
    *,
    dtype: str | torch.dtype | None = None,
    max_shard_bytes: int | None = DEFAULT_SHARD_BYTES,
    model: nn.Module | None = None,
    config: str | Path | None = None,
    overwrite: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> Conversion:
    """Convert a checkpoint, streaming: at most some 64 MiB of tensors are in memory at any time.

    Args:
        src: Any checkpoint that `inspect_checkpoint` knows.
        dst: A new folder (`dcp`, `safetensors`) or file (`full`; `safetensors` where it ends so). A URL for `dcp` only.
        format: `dcp`: sharded, ours and torch's, everything kept. `full`: one `torch.save` file, everything kept.
            `safetensors`: the model's weights alone, in a folder that transformers can open.
        dtype: What floating-point weights of the model become; the optimizer's state keeps its own.
        max_shard_bytes: Of tensors in one safetensors file; None: all in one.
        model: The model's definition, where the files do not name its parameters (FSDP1's LOCAL state dicts,
            optimizers that number them). On the meta device is enough.
        config: Where `config.json` and the tokenizer's files are, for `safetensors`; default: beside the source.
        overwrite: Replace safetensors or a full file that are there already.
        verify: Also compare torch's own files with the CRC-32 they carry, before anything is written; what shardwise
            wrote is verified as it is read in any case.
        progress: Is told the bytes as they are written.

    Returns:
        What was written, and what could not be.

    Raises:
        CheckpointError: The source is damaged, names are missing, the disk is full; `dst` is then not there.

    Ranks:
        Local: one process, no process group. The number of ranks that wrote the source does not matter.
    """
    if format not in ("dcp", "full", "safetensors"):
        raise ConfigError(f"{format!r} is no format to write", where="format", fix="choose dcp, full or safetensors")
    if format != "dcp":
        refuse_remote(dst)
    listener = progress or NoProgress()
    source = open_checkpoint(src, model=model)
    contents, left_out = _what_to_write(source, format)
    targets = _target_dtypes(contents, dtype, bare=format == "safetensors")
    if verify:
        refuse_damaged(source, listener)
    if format == "dcp":
        copy_to_dcp(contents, files.place(dst), targets, progress=listener)
    elif format == "full":
        copy_to_full(contents, Path(dst), targets, overwrite=overwrite, progress=listener)
    else:
        writer = SafetensorsWriter(
            Path(dst),
            [TensorInfo(name, targets[name], tensor.shape) for name, tensor in contents.tensors.items()],
            max_shard_bytes=max_shard_bytes,
            companions=read_companions(Path(config) if config is not None else source.folder),
            overwrite=overwrite,
        )
        copy_to_safetensors(contents, writer, progress=listener)
    return Conversion(
        path=files.place(dst),
        format=format,
        source_format=source.format,
        num_tensors=len(contents.tensors),
        num_bytes=copied_bytes(contents, targets),
        left_out=left_out,
    )


def _what_to_write(source: Contents, format: Format) -> tuple[Contents, dict[str, str]]:
    """The contents under our names, and what the format cannot hold."""
    require_names(source, optimizers=format != "safetensors")
    contents = with_our_names(source)
    left_out = dict(source.details.get("left_out", {}))
    if format == "safetensors":
        names = (*contents.tensors, *contents.values)
        left_out |= {name: "not a weight of the model" for name in names if not name.startswith("model.")}
        contents = only_model(contents)
    refuse_unsound(contents)
    return contents, left_out


def _target_dtypes(contents: Contents, dtype: str | torch.dtype | None, *, bare: bool) -> dict[str, str]:
    """What each tensor is written as."""
    wanted = None if dtype is None else str(dtype).removeprefix("torch.")
    if wanted is not None and wanted not in _FLOATS:
        raise ConfigError(
            f"{wanted!r} is no floating-point dtype", where="dtype", fix=f"choose one of {', '.join(_FLOATS)}"
        )
    return {
        name: wanted if wanted and tensor.dtype in _FLOATS and (bare or name.startswith("model.")) else tensor.dtype
        for name, tensor in contents.tensors.items()
    }
