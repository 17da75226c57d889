"""The folder that accelerate and transformers' Trainer leave of an FSDP run: a model and an optimizer side by side."""

from __future__ import annotations

from dataclasses import replace

from shardwise.checkpointing.contents import Contents, StoredTensor
from shardwise.checkpointing.formats.dcp import is_dcp, read_dcp
from shardwise.checkpointing.formats.full import read_full
from shardwise.checkpointing.state.sections import with_our_names
from shardwise.checkpointing.storage import files

_PARTS = (("pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"), ("optimizer_0", "optimizer.bin"))
"""Of each part the folder (SHARDED) and the file (FULL) that it may be."""


def is_accelerate(folder: files.Place) -> bool:
    """Whether a folder holds a model as accelerate saves one of an FSDP run."""
    return any(name in _PARTS[0] for name in files.names_in(folder))


def read_accelerate(folder: files.Place) -> Contents:
    """Read the model and, where it is there, the optimizer.

    Schedulers, random states and the like that lie beside them are not read.

    Raises:
        CheckpointError: A part is damaged, or asks for code to be run.

    Ranks:
        Local.
    """
    merged = Contents(path=folder, format="fsdp1-full", tensors={})
    for sharded, full in _PARTS:
        if is_dcp(files.join(folder, sharded)):  # pyrefly: ignore[bad-argument-type]  # a URL where remote
            part = _moved(read_dcp(files.join(folder, sharded)), sharded)
            inside = (*merged.details.get("dcp_folders", ()), sharded)
            merged = replace(merged, format="fsdp1-sharded", details={"dcp_folders": inside})
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
        )
    return merged


def _moved(part: Contents, subfolder: str) -> Contents:
    """The same contents, with files named from the folder above."""
    tensors = {name: _moved_tensor(tensor, subfolder) for name, tensor in part.tensors.items()}
    sizes = {f"{subfolder}/{file}": size for file, size in part.file_bytes.items()}
    return replace(part, tensors=tensors, file_bytes=sizes)


def _moved_tensor(tensor: StoredTensor, subfolder: str) -> StoredTensor:
    pieces = (replace(piece, file=f"{subfolder}/{piece.file}") if piece.file else piece for piece in tensor.pieces)
    return replace(tensor, pieces=tuple(pieces))
