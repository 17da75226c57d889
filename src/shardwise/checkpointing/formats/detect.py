"""Which format a path has."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.checkpointing.contents import Contents
from shardwise.checkpointing.formats import fsdp1
from shardwise.checkpointing.formats.dcp import is_dcp, read_dcp
from shardwise.checkpointing.formats.full import is_bin_shards, read_bin_shards, read_full
from shardwise.checkpointing.formats.rank_files import TORCH_SUFFIXES, find_series, read_rank_files
from shardwise.checkpointing.formats.safetensors import is_safetensors, read_safetensors
from shardwise.checkpointing.formats.sharded import MANIFEST_NAME, METADATA_NAME, committed_steps, step_folder
from shardwise.checkpointing.pickles.torch_files import is_torch_file
from shardwise.checkpointing.state.names import with_our_names
from shardwise.checkpointing.storage import files
from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn


_PARTS = (("pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"), ("optimizer_0", "optimizer.bin"))
"""Of each part that accelerate saves of an FSDP run, the folder (SHARDED) and the file (FULL) that it may be."""


def read_accelerate(folder: files.Place) -> Contents:
    """Read the model and, where it is there, the optimizer.

    Schedulers, random states and the like that lie beside them are not read.

    Raises:
        CheckpointError: A part is damaged, or asks for code to be run.
    """
    merged = Contents(path=folder, format="fsdp1-full", tensors={})
    for sharded, full in _PARTS:
        if files.size_of(files.join(folder, f"{sharded}/{METADATA_NAME}")) is not None:
            part = read_dcp(folder, f"{sharded}/")
            merged = replace(merged, format="fsdp1-sharded")
        elif files.size_of(files.join(folder, full)) is not None:
            part = read_full(files.join(folder, full))
        else:
            continue
        named = with_our_names(part)
        merged = replace(
            merged,
            tensors={**merged.tensors, **named.tensors},
            values={**merged.values, **named.values},
            structure={**merged.structure, **named.structure},
            file_bytes={**merged.file_bytes, **named.file_bytes},
            streams=(*merged.streams, *named.streams),
        )
    return merged


def open_checkpoint(path: str | files.Place, *, model: nn.Module | None = None) -> Contents:
    """Read a checkpoint of any format as far as its index.

    Args:
        path: A folder (ours, a run's with several steps, torch's Distributed Checkpoint, Hugging Face's, one file a
            rank) or a file (safetensors, an index, `torch.save`).
        model: What it was saved from, where the files alone do not name the parameters: FSDP1's LOCAL state dicts and
            optimizers that number their parameters. On the meta device is enough.

    Returns:
        The contents, under the names it was saved with.

    Raises:
        CheckpointError: Nothing is there, it is of no known format, damaged, or asks for code to be run.

    Ranks:
        Local. Every rank may open the same checkpoint.
    """
    place = files.place(path)
    contents = _open_file(place) if files.size_of(place) is not None else _open_folder(place)
    if not fsdp1.needs_model(contents):
        return contents
    layout = fsdp1.layout_of_model(model, contents) if model is not None else fsdp1.read_layout(contents.folder)
    return contents if layout is None else fsdp1.unflatten(contents, layout)


def require_names(contents: Contents, *, optimizers: bool = True) -> None:
    """Refuse contents whose parameters still have no names.

    Args:
        contents: From `open_checkpoint`.
        optimizers: Those that number their parameters are refused, too.

    Raises:
        CheckpointError: With what to pass.
    """
    flat = len(fsdp1.flat_sizes(contents))
    if not flat and not (optimizers and fsdp1.needs_model(contents)):
        return
    if not flat and isinstance(reason := contents.details.get("unnamed"), CheckpointError):
        raise reason
    what = f"{flat} flat parameters (FSDP1's LOCAL state dict)" if flat else "an optimizer that numbers its parameters"
    raise CheckpointError(
        f"the checkpoint holds {what}, and the files do not say which parameters they are",
        where=str(contents.path),
        why="only the model's definition, or a layout recorded while it was there, tells their names and shapes",
        fix=f"pass the model (`--model MODEL`, or model=), or put a {fsdp1.LAYOUT_FILE} beside the files",
    )


def _open_file(place: files.Place) -> Contents:
    folder, name = files.split(place)
    if is_safetensors(place):
        return read_safetensors(place)
    if name.endswith(".bin.index.json"):
        return read_bin_shards(place)
    if name in (METADATA_NAME, MANIFEST_NAME) or name.endswith(".distcp"):
        return _open_folder(folder)
    if is_torch_file(place) or name.endswith(TORCH_SUFFIXES):
        return read_full(place)
    raise _unknown(place, "the file is not a safetensors file, not an index of one, and not what torch.save writes")


def _open_folder(place: files.Place) -> Contents:
    names = files.names_in(place)
    if not names:
        what = "the folder is empty" if files.exists(place) else "there is no such file or folder"
        raise CheckpointError(what, where=str(place), fix="check the path")
    if is_dcp(place):
        return read_dcp(place)
    if steps := committed_steps(place):
        return read_dcp(step_folder(place, steps[-1]))
    if any(name in _PARTS[0] for name in names):
        return read_accelerate(place)
    if is_safetensors(place):
        return read_safetensors(place)
    if is_bin_shards(place):
        return read_bin_shards(place)
    torch_names = [name for name in names if name.endswith(TORCH_SUFFIXES)]
    if len(torch_names) == 1:
        return read_full(files.join(place, torch_names[0]))
    if find_series(place):
        return read_rank_files(place)
    if any(name.endswith(".distcp") for name in names):
        why = "`.metadata` is written last: the save was interrupted, or the file was not copied"
        fix = files.COPY_AGAIN + " with its hidden files"
        raise files.damaged("the folder has the data of a checkpoint but no index", place, why, fix)
    raise _unknown(place, f"it holds {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}")


def _unknown(place: files.Place, found: str) -> CheckpointError:
    return CheckpointError(
        "this is not a checkpoint of a known format",
        where=str(place),
        why=f"{found}; tried: Distributed Checkpoint folders, ours and torch's (`manifest.json`, `.metadata`), runs of "
        "several steps, safetensors files and indexes, Hugging Face `.bin` shards, torch.save files, one or one a rank",
        fix="name the checkpoint's own folder or file",
    )
