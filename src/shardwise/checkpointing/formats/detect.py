"""Detect the format of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.checkpointing import storage
from shardwise.checkpointing.contents import Contents, merge_contents
from shardwise.checkpointing.formats import fsdp1
from shardwise.checkpointing.formats.dcp import is_dcp, read_dcp
from shardwise.checkpointing.formats.full import is_bin_shards, read_bin_shards, read_full
from shardwise.checkpointing.formats.rank_files import TORCH_SUFFIXES, read_rank_files
from shardwise.checkpointing.formats.safetensors import is_safetensors, read_safetensors
from shardwise.checkpointing.formats.sharded import MANIFEST_NAME, METADATA_NAME, committed_steps, step_folder
from shardwise.checkpointing.names import with_our_names
from shardwise.checkpointing.pickles.torch_files import is_torch_file
from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn


_PARTS = (("pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"), ("optimizer_0", "optimizer.bin"))
"""Folder (SHARDED) and file (FULL) names of each part that accelerate saves of an FSDP run."""


def read_accelerate(folder: storage.Place) -> Contents:
    """Read the model and, if it was saved, the optimizer; other files are ignored."""
    format, parts = "fsdp1-full", []
    for sharded, full in _PARTS:
        if storage.size_of(storage.join(folder, f"{sharded}/{METADATA_NAME}")) is not None:
            format = "fsdp1-sharded"
            parts.append(with_our_names(read_dcp(folder, f"{sharded}/")))
        elif storage.size_of(storage.join(folder, full)) is not None:
            parts.append(with_our_names(read_full(storage.join(folder, full))))
    return merge_contents(folder, format, parts)


def open_checkpoint(path: str | storage.Place, *, model: nn.Module | None = None) -> Contents:
    """Read the index of a checkpoint of any format, under the names it was saved with.

    Args:
        path: A folder (shardwise's, a run with several steps, Distributed Checkpoint, Hugging Face, one file per
            rank) or a file (safetensors, an index, `torch.save`).
        model: The saved model; needed if files do not name the parameters: FSDP1's LOCAL state dicts and optimizers
            that number their parameters. It may be on the meta device.
    """
    place = storage.place(path)
    contents = _open_file(place) if storage.size_of(place) is not None else _open_folder(place)
    if not fsdp1.needs_model(contents):
        return contents
    layout = fsdp1.layout_of_model(model, contents) if model is not None else fsdp1.read_layout(contents.folder)
    return contents if layout is None else fsdp1.unflatten(contents, layout)


def require_names(contents: Contents, *, optimizers: bool = True) -> None:
    """Raise if parameters, or with `optimizers` their state, still have no names."""
    flat = len(fsdp1.flat_sizes(contents))
    if not flat and not (optimizers and fsdp1.needs_model(contents)):
        return
    if not flat and isinstance(reason := contents.details.get("unnamed"), CheckpointError):
        raise reason
    what = f"{flat} flat parameters (FSDP1's LOCAL state dict)" if flat else "an optimizer that numbers its parameters"
    raise CheckpointError(
        f"the checkpoint holds {what}, and the files do not name the parameters",
        where=str(contents.path),
        why="their names and shapes are only in the model's definition or a recorded layout",
        fix=f"pass the model (`--model MODEL`, or model=), or put a {fsdp1.LAYOUT_FILE} beside the files",
    )


def _open_file(place: storage.Place) -> Contents:
    folder, name = storage.split(place)
    if is_safetensors(place):
        return read_safetensors(place)
    if name.endswith(".bin.index.json"):
        return read_bin_shards(place)
    if name in (METADATA_NAME, MANIFEST_NAME) or name.endswith(".distcp"):
        return _open_folder(folder)
    if is_torch_file(place) or name.endswith(TORCH_SUFFIXES):
        return read_full(place)
    raise _unknown(place, "the file is not a safetensors file, not an index of one, and not what torch.save writes")


def _open_folder(place: storage.Place) -> Contents:
    names = storage.names_in(place)
    if not names:
        what = "the folder is empty" if storage.exists(place) else "there is no such file or folder"
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
        return read_full(storage.join(place, torch_names[0]))
    if any(name.endswith(".distcp") for name in names):
        why = "`.metadata` is written last: the save was interrupted, or the file was not copied"
        fix = storage.COPY_AGAIN + " with its hidden files"
        raise storage.damaged("the folder has the data of a checkpoint but no index", place, why, fix)
    if torch_names:
        return read_rank_files(place)
    raise _unknown(place, f"it holds {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}")


def _unknown(place: storage.Place, found: str) -> CheckpointError:
    return CheckpointError(
        "this is not a checkpoint of a known format",
        where=str(place),
        why=f"{found}; tried: Distributed Checkpoint folders, ours and torch's (`manifest.json`, `.metadata`), runs of "
        "several steps, safetensors files and indexes, Hugging Face `.bin` shards, torch.save files (one, or one per "
        "rank)",
        fix="name the checkpoint's own folder or file",
    )
