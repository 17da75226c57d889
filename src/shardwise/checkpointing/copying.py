"""Copy the contents of a checkpoint into another format, a bounded part of a tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checkpointing.contents import ITEM_BYTES, Box, Contents, StoredTensor
from shardwise.checkpointing.flat.flat_params import boxes_of_range
from shardwise.checkpointing.formats.full_notes import NOTES, make_notes, plain_values
from shardwise.checkpointing.formats.full_writing import FullWriter
from shardwise.checkpointing.formats.safetensors_writing import SafetensorsWriter
from shardwise.checkpointing.formats.tensor_info import TensorInfo
from shardwise.checkpointing.pickles.torch_zip import value_stream
from shardwise.checkpointing.reading.requests import read_box
from shardwise.checkpointing.sharded.committing import begin_checkpoint, commit_checkpoint, partial_of
from shardwise.checkpointing.sharded.manifest import Header
from shardwise.checkpointing.sharded.values import encode_value
from shardwise.checkpointing.sharded.writing import Item, file_name, write_rank_file
from shardwise.checkpointing.storage import files
from shardwise.checkpointing.storage.memory import bytes_of
from shardwise.progress import Progress

if TYPE_CHECKING:
    import torch

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


def boxes_of(tensor: StoredTensor) -> Iterator[Box]:
    """The tensor in boxes that follow each other in row-major order, each small enough to hold in memory."""
    numel = math.prod(tensor.shape)
    step = _CHUNK_BYTES // ITEM_BYTES[tensor.dtype]
    if numel <= step:
        yield Box.whole(tensor.shape)
        return
    row = numel // tensor.shape[0]
    step = step // row * row if row <= step else step  # whole rows where they fit, so that few boxes are needed
    for start in range(0, numel, step):
        for box, _ in boxes_of_range(tensor.shape, start, min(start + step, numel)):
            yield box


def _parts(contents: Contents, tensor: StoredTensor, dtype: str) -> Iterator[tuple[Box, torch.Tensor]]:
    import torch

    for box in boxes_of(tensor):
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
