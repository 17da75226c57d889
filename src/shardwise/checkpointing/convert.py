"""convert_checkpoint(): copy a checkpoint into another format, chunk by chunk, without a process group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from shardwise.checkpointing import storage
from shardwise.checkpointing.contents import ChunkSpec, Contents, LocalChunk, StoredTensor
from shardwise.checkpointing.formats import sharded
from shardwise.checkpointing.formats.detect import open_checkpoint, require_names
from shardwise.checkpointing.formats.full import FullWriter, full_tree
from shardwise.checkpointing.formats.safetensors import DEFAULT_SHARD_BYTES, Chunks, SafetensorsWriter
from shardwise.checkpointing.formats.values import encode_value
from shardwise.checkpointing.hugging_face import read_sidecar_files
from shardwise.checkpointing.inspecting import refuse_damaged, refuse_unsound
from shardwise.checkpointing.names import only_model, with_our_names
from shardwise.checkpointing.reading import read_chunk
from shardwise.checkpointing.weights import float_dtype, local_path, refuse_suffix
from shardwise.errors import require_choice
from shardwise.progress import Progress

_CHUNK_BYTES = 64 << 20
_NOT_KEPT = ("aliases", "frames", "left_out", "metadata")


def _write(writer: FullWriter | SafetensorsWriter, contents: Contents, progress: Progress | None) -> None:
    """Write the tensors that the writer lists, cast to its dtypes."""

    def chunks() -> Chunks:
        for info in writer.order:
            for _, part in _parts(contents, info):
                data = storage.bytes_of(part)
                count(len(data))
                yield info, data

    with storage.counting(progress, sum(info.num_bytes for info in writer.order), "converting") as count:
        writer.write(chunks())


def _write_dcp(
    contents: Contents, dst: storage.Place, infos: Mapping[str, StoredTensor], progress: Progress | None
) -> None:
    """Copy everything into a sharded checkpoint with one file."""
    aliases = _aliases(contents)
    stored = {name: info for name, info in infos.items() if name not in aliases}
    items = (
        LocalChunk(name, info.dtype, info.shape, spec, part)
        for name, info in stored.items()
        for spec, part in _parts(contents, info)
    )
    kept = {key: value for key, value in contents.details.items() if key not in _NOT_KEPT}
    header = sharded.Header(
        step=contents.step,
        world_size=contents.world_size,
        values={name: encode_value(value, name) for name, value in contents.values.items()},
        aliases=aliases,
        structure={
            name: path
            for name, path in contents.structure.items()
            if name in contents.tensors or name in contents.values
        },
        details=kept if contents.format == "sharded" else {"converted_from": contents.format},
    )
    streams = sharded.value_streams(header.values)
    partial = sharded.begin_checkpoint(dst)
    try:
        total = sum(info.num_bytes for info in stored.values())
        record = sharded.write_rank_file(
            storage.join(partial, sharded.file_name(0)), items, streams, total=total, progress=progress
        )
        sharded.commit_checkpoint(dst, [record], header)
    except BaseException:
        sharded.discard_partial(dst)
        raise


def _aliases(contents: Contents) -> dict[str, str]:
    """Return tied weights of the model: second names of the same bytes, each with the first name."""
    first: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in contents.tensors.items():
        if not name.startswith("model.") or not tensor.chunks or any(chunk.data is not None for chunk in tensor.chunks):
            continue
        key = (tensor.dtype, tensor.shape, tensor.place)
        if tensor.num_bytes and first.setdefault(key, name) != name:
            aliases[name] = first[key]
    return aliases


def _parts(contents: Contents, info: StoredTensor) -> Iterator[tuple[ChunkSpec, torch.Tensor]]:
    tensor = contents.tensors[info.name]
    for spec in tensor.portions(max_bytes=_CHUNK_BYTES):
        yield spec, read_chunk(contents, tensor, spec).to(getattr(torch, info.dtype)).contiguous()


Format = Literal["dcp", "full", "safetensors"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """Result of a conversion."""

    path: storage.Place
    format: Format
    source_format: str
    num_tensors: int
    num_bytes: int
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Omitted names, each with the reason."""


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
    """Convert a checkpoint; it is streamed, with at most about 64 MiB of tensors in memory.

    Args:
        src: A checkpoint of any format that `inspect_checkpoint` supports.
        dst: A new folder (`dcp`, `safetensors`) or file (`full`, or `x.safetensors`). URLs: only for `dcp`.
        format: `dcp`: sharded, the format of shardwise and torch, everything kept. `full`: one `torch.save` file,
            everything kept. `safetensors`: only the model's weights, in a folder that transformers can open.
        dtype: Dtype of the model's floating-point weights; optimizer state keeps its dtype.
        max_shard_bytes: Maximum bytes of tensors in one safetensors file; None: a single file.
        model: The model's definition, if the files do not name its parameters (FSDP1's LOCAL state dicts, optimizers
            that number them). It may be on the meta device.
        config: Location of `config.json` and the tokenizer's files, for `safetensors`; default: the source's folder.
        overwrite: Replace an existing safetensors or full file.
        verify: First verify the CRC-32 checksums of torch's files, before anything is written; files of shardwise are
            always verified as they are read.
        progress: Receives the written bytes.

    Returns:
        Path, formats and sizes of the conversion, and the names that could not be written.

    Raises:
        CheckpointError: The source is damaged, names are missing, or the disk is full; `dst` then does not exist.

    Ranks:
        Local: one process, no process group. The source may be from any number of ranks.
    """
    require_choice(format, get_args(Format), where="convert_checkpoint(format=...)")
    refuse_suffix(dst, format, 'format="full"')
    target = storage.place(dst) if format == "dcp" else local_path(dst)
    source = open_checkpoint(src, model=model)
    contents, left_out = _what_to_write(source, format)
    infos = _infos(contents, dtype, bare=format == "safetensors")
    if verify:
        refuse_damaged(source, progress)
    if format == "dcp":
        _write_dcp(contents, target, infos, progress)
    elif format == "full":  # the nested dictionary, with a tensor description in place of each tensor
        encoded = {name: encode_value(value, name) for name, value in contents.values.items()}
        tensors = infos | {alias: infos[name] for alias, name in _aliases(contents).items()}
        tree = full_tree(tensors, encoded, contents.structure, step=contents.step, world_size=contents.world_size)
        _write(FullWriter(Path(target), tree, overwrite=overwrite), contents, progress)
    else:
        sidecars = read_sidecar_files(storage.place(config) if config is not None else source.folder)
        options = {"max_shard_bytes": max_shard_bytes, "sidecars": sidecars, "overwrite": overwrite}
        _write(SafetensorsWriter(Path(target), infos.values(), **options), contents, progress)
    return Conversion(
        path=target,
        format=format,
        source_format=source.format,
        num_tensors=len(contents.tensors),
        num_bytes=sum(info.num_bytes for info in infos.values()),
        left_out=left_out,
    )


def _what_to_write(source: Contents, format: Format) -> tuple[Contents, dict[str, str]]:
    """Return the contents under shardwise's names, and the values that the format does not support."""
    require_names(source, optimizers=format != "safetensors")
    contents = with_our_names(source)
    left_out = dict(source.details.get("left_out", {}))
    if format == "safetensors":
        names = (*contents.tensors, *contents.values)
        left_out |= {name: "not a weight of the model" for name in names if not name.startswith("model.")}
        contents = only_model(contents)
    refuse_unsound(contents)
    return contents, left_out


def _infos(contents: Contents, dtype: str | torch.dtype | None, *, bare: bool) -> dict[str, StoredTensor]:
    """Return the name, dtype and shape of each written tensor."""
    wanted = float_dtype(dtype, "dtype")
    infos = {}
    for name, tensor in contents.tensors.items():
        is_cast = tensor.dtype.startswith(("float", "bfloat")) and (bare or name.startswith("model."))
        infos[name] = StoredTensor(name, wanted if wanted and is_cast else tensor.dtype, tensor.shape)
    return infos
