"""convert_checkpoint(): copy a checkpoint into another format, chunk by chunk, without a process group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardwise.checkpointing.contents import ITEM_BYTES, Box, Contents, StoredTensor, TensorInfo, portions
from shardwise.checkpointing.formats.detect import open_checkpoint, require_names
from shardwise.checkpointing.formats.full import NOTES, FullWriter, make_notes, plain_values
from shardwise.checkpointing.formats.safetensors import DEFAULT_SHARD_BYTES, SafetensorsWriter
from shardwise.checkpointing.formats.sharded import Header, Item, file_name, write_rank_file
from shardwise.checkpointing.formats.sharded_commit import begin_checkpoint, commit_checkpoint, partial_of
from shardwise.checkpointing.formats.values import encode_value
from shardwise.checkpointing.hugging_face import read_companions
from shardwise.checkpointing.pickles.zip_files import value_stream
from shardwise.checkpointing.reading import read_box
from shardwise.checkpointing.state.names import only_model, with_our_names
from shardwise.checkpointing.storage import files
from shardwise.checkpointing.storage.memory import bytes_of
from shardwise.checkpointing.verifying import refuse_damaged, refuse_unsound
from shardwise.checkpointing.weights import refuse_remote
from shardwise.errors import ConfigError
from shardwise.progress import NoProgress, Progress

if TYPE_CHECKING:
    import torch
    from torch import nn

_CHUNK_BYTES = 64 << 20


def copied_bytes(contents: Contents, targets: Mapping[str, str]) -> int:
    """Bytes of all tensors once they have the dtypes of `targets`."""
    return sum(_num_bytes(tensor, targets[name]) for name, tensor in contents.tensors.items())


def _num_bytes(tensor: StoredTensor, dtype: str) -> int:
    return tensor.num_bytes // ITEM_BYTES[tensor.dtype] * ITEM_BYTES[dtype]


def copy_to_safetensors(contents: Contents, writer: SafetensorsWriter, *, progress: Progress) -> None:
    """Copy every tensor that the writer expects.

    Ranks:
        Local.
    """
    with writer, _Progress(progress, sum(info.num_bytes for info in writer.order)) as done:
        for info in writer.order:
            for _, part in _parts(contents, contents.tensors[info.name], info.dtype):
                data = bytes_of(part)
                writer.write(info.name, data)
                done.advance(len(data))


def copy_to_full(
    contents: Contents, dst: Path, targets: Mapping[str, str], *, overwrite: bool, progress: Progress
) -> None:
    """Copy everything into one `torch.save` file; `targets` says each tensor's dtype there.

    Ranks:
        Local.
    """
    stored = _aliases(contents)
    infos = {
        name: TensorInfo(name, targets[name], tensor.shape)
        for name, tensor in contents.tensors.items()
        if name not in stored
    }
    infos |= {alias: infos[name] for alias, name in stored.items()}
    writer = FullWriter(dst, _nested(contents, infos), overwrite=overwrite)
    with writer, _Progress(progress, sum(info.num_bytes for info in writer.order)) as done:
        for info in writer.order:
            for _, part in _parts(contents, contents.tensors[info.name], info.dtype):
                data = bytes_of(part)
                writer.write(info, data)
                done.advance(len(data))


def copy_to_dcp(contents: Contents, dst: files.Place, targets: Mapping[str, str], *, progress: Progress) -> None:
    """Copy everything into a sharded checkpoint of one file; `targets` says each tensor's dtype there.

    Ranks:
        Local.
    """
    aliases = _aliases(contents)
    stored = {name: tensor for name, tensor in contents.tensors.items() if name not in aliases}
    total = sum(_num_bytes(tensor, targets[name]) for name, tensor in stored.items())

    def items() -> Iterator[Item]:
        for name, tensor in stored.items():
            for box, part in _parts(contents, tensor, targets[name]):
                yield Item(name, targets[name], tensor.shape, box, part)

    header = Header(
        step=contents.step,
        world_size=contents.world_size,
        values={name: encode_value(value, name) for name, value in contents.values.items()},
        aliases=aliases,
        structure=contents.structure,
        details=_details(contents),
    )
    streams = {name: value_stream(value) for name, value in contents.values.items()}
    partial = begin_checkpoint(dst)
    try:
        place = files.join(partial, file_name(0))
        record = write_rank_file(place, items(), streams, total=total, progress=progress)
        commit_checkpoint(dst, [record], header)
    except BaseException:
        files.remove_tree(partial_of(dst))
        raise


def _details(contents: Contents) -> dict[str, Any]:
    kept = {key: value for key, value in contents.details.items() if key not in ("aliases", "left_out", "metadata")}
    return kept if contents.format == "sharded" else {"converted_from": contents.format}


def _aliases(contents: Contents) -> dict[str, str]:
    """Names of the model that are a second name of the same bytes: tied weights."""
    first: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in contents.tensors.items():
        if not name.startswith("model.") or not tensor.pieces or any(piece.data is not None for piece in tensor.pieces):
            continue
        key = (tensor.dtype, tensor.shape, tuple((piece.box, piece.file, piece.offset) for piece in tensor.pieces))
        if tensor.num_bytes and first.setdefault(key, name) != name:
            aliases[name] = first[key]
    return aliases


def _parts(contents: Contents, tensor: StoredTensor, dtype: str) -> Iterator[tuple[Box, torch.Tensor]]:
    import torch

    for box in portions(Box.whole(tensor.shape), ITEM_BYTES[tensor.dtype], _CHUNK_BYTES):
        yield box, read_box(contents, tensor, box).to(getattr(torch, dtype)).contiguous()


def _nested(contents: Contents, infos: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The dictionary that was flattened, with what stands for each tensor in its place."""
    encoded = {name: encode_value(value, name) for name, value in contents.values.items()}
    root: dict[str, Any] = {}
    for name, leaf in {**infos, **plain_values(encoded)}.items():
        path = contents.structure.get(name, (name,))
        here: Any = root
        for key in path[:-1]:
            here = here.setdefault(key, {})
        here[path[-1]] = leaf
    notes = make_notes(encoded, contents.structure, step=contents.step, world_size=contents.world_size)
    return {**_with_lists(root), NOTES: notes}


def _with_lists(tree: Any) -> Any:
    """Dictionaries whose keys are 0, 1, 2, ... as numbers were lists."""
    if type(tree) is not dict:
        return tree
    entries = {key: _with_lists(value) for key, value in tree.items()}
    is_list = bool(entries) and all(type(key) is int for key in entries)
    return [entries[key] for key in sorted(entries)] if is_list else entries


class _Progress:
    """Starts and finishes a progress around a block."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total = progress, total

    def __enter__(self) -> Progress:
        self._progress.start(self._total, "converting")
        return self._progress

    def __exit__(self, *error: object) -> None:
        self._progress.finish()


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
