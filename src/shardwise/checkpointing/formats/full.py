"""A single `torch.save` file with everything in it, read as data: no code runs, and tensors stay on the disk."""

from __future__ import annotations

from shardwise.checkpointing.contents import Box, Contents, StoredTensor
from shardwise.checkpointing.formats.full_notes import with_notes
from shardwise.checkpointing.pickles.torch_files import read_torch_file
from shardwise.checkpointing.pickles.torch_refs import TensorRef
from shardwise.checkpointing.storage import files
from shardwise.errors import CheckpointError


def read_full(path: str | files.Place) -> Contents:
    """Read a `torch.save` file of nested dictionaries into contents.

    Args:
        path: A state dict, or a dictionary of such (`{"model": ..., "optimizer": ..., "meta": ...}`).

    Returns:
        The contents; nested keys are joined by dots, as Distributed Checkpoint does.

    Raises:
        CheckpointError: The file is damaged, of the format before torch 1.6, would run code, or holds only one
            rank's part.

    Ranks:
        Local.
    """
    file = read_torch_file(path)
    tensors = {}
    for name, reference in file.state.tensors.items():
        if not isinstance(reference, TensorRef):
            raise CheckpointError(
                f"{name!r} is one rank's part of a larger tensor",
                where=str(file.place),
                why="the file was written by one rank of a sharded run (ShardedTensor or DTensor), not gathered",
                fix="name the folder that holds the files of all ranks",
            )
        piece = file.piece(reference, Box.whole(reference.shape))
        tensors[name] = StoredTensor(name, reference.dtype, reference.shape, (piece,))
    contents = Contents(
        path=files.split(file.place)[0] if isinstance(file.place, str) else file.place,  # a URL does not tell
        format="full",
        tensors=tensors,
        values=file.state.values,
        file_bytes={file.name: file.num_bytes},
        block_bytes=file.block_bytes,
        structure=file.state.structure,
        details={"left_out": file.state.left_out} if file.state.left_out else {},
    )
    return with_notes(contents)
