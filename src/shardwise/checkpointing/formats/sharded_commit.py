"""Commit a checkpoint of our own format with one rename, and find the committed ones."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from shardwise.checkpointing.formats import sharded
from shardwise.checkpointing.storage import files
from shardwise.errors import CheckpointError

_STEP = re.compile(r"step-(\d{8,})")
_PARTIAL, _REMOVING = ".partial", ".removing"


def step_folder(root: str | files.Place, step: int) -> files.Place:
    """Where the checkpoint of a step lies under `root`."""
    return files.join(files.place(root), f"step-{step:08d}")


def partial_of(folder: files.Place) -> files.Place:
    """Where a checkpoint is written before it is committed; in an object store its own place."""
    return folder if isinstance(folder, str) else folder.with_name(folder.name + _PARTIAL)


def begin_checkpoint(folder: files.Place) -> files.Place:
    """Make the partial folder, empty, for a checkpoint that shall be called `folder`.

    Returns:
        The partial folder; every rank writes its file into it.

    Raises:
        CheckpointError: There is something of that name already.

    Ranks:
        Local: call it on rank 0, before any rank writes.
    """
    if is_committed(folder) or (isinstance(folder, Path) and files.exists(folder)):
        raise CheckpointError(
            f"there is a checkpoint called {files.split(folder)[1]} already",
            where=str(folder),
            why="a committed checkpoint is never written over",
            fix="save under another step or into another folder, or remove this one",
        )
    partial = partial_of(folder)
    files.remove_tree(partial)  # left over from a save that was interrupted
    files.make_folder(partial)
    return partial


def commit_checkpoint(
    folder: files.Place, records: Iterable[sharded.FileRecord], header: sharded.Header, *, fsync: bool = True
) -> None:
    """Make what the ranks have written a checkpoint: metadata, manifest, sync, rename.

    Args:
        folder: Its final place; the ranks' files are in `partial_of(folder)`.
        records: What each rank wrote.
        header: What the manifest says besides.
        fsync: Return only when the disk has it all.

    Raises:
        CheckpointError: A tensor is not stored whole and once, or the system refuses; nothing is committed then.

    Ranks:
        Local: call it on rank 0, when all have written.
    """
    records = sorted(records, key=lambda record: record.file)
    partial = partial_of(folder)
    metadata = sharded.torch_metadata(records, aliases=header.aliases, structure=header.structure)
    manifest = sharded.manifest_bytes(folder, records, header, {sharded.METADATA_NAME: metadata})
    files.write_small(files.join(partial, sharded.METADATA_NAME), metadata, fsync=fsync)
    files.write_small(files.join(partial, sharded.MANIFEST_NAME), manifest, fsync=fsync)
    if isinstance(folder, str) or isinstance(partial, str):
        return
    if fsync:
        files.sync_folder(partial)
    with files.os_errors("give the checkpoint its name", folder):
        os.rename(partial, folder)
    if fsync:
        files.sync_folder(folder.parent)
        with contextlib.suppress(CheckpointError):  # the first save may have made the run's folder, in one not ours
            files.sync_folder(folder.parent.parent)


def is_committed(folder: files.Place) -> bool:
    """Whether a complete checkpoint of ours lies there."""
    if files.split(folder)[1].endswith((_PARTIAL, _REMOVING)):
        return False
    return files.size_of(files.join(folder, sharded.MANIFEST_NAME)) is not None


def committed_steps(root: str | files.Place) -> list[int]:
    """The steps of all committed checkpoints under `root`, in ascending order."""
    root = files.place(root)
    steps = [int(match.group(1)) for name in files.names_in(root) if (match := _STEP.fullmatch(name))]
    return sorted(step for step in steps if is_committed(step_folder(root, step)))


def remove_checkpoint(folder: files.Place) -> None:
    """Remove a checkpoint so that it is never seen half removed.

    Ranks:
        Local: call it on rank 0.
    """
    if isinstance(folder, str):
        files.remove_tree(files.join(folder, sharded.MANIFEST_NAME))
        files.remove_tree(folder)
    else:
        retired = folder.with_name(folder.name + _REMOVING)
        files.remove_tree(retired)
        with files.os_errors("remove the checkpoint", folder), contextlib.suppress(FileNotFoundError):
            os.rename(folder, retired)
        files.remove_tree(retired)


def sweep(root: str | files.Place) -> list[files.Place]:
    """Remove what interrupted saves and removals left under `root`; nothing may be saving there now.

    Returns:
        The places that were removed.

    Ranks:
        Local: call it on rank 0.
    """
    root = files.place(root)
    leftovers = []
    for name in files.names_in(root):
        bare = name.removesuffix(_PARTIAL).removesuffix(_REMOVING)
        if _STEP.fullmatch(bare) is None:
            continue
        if bare != name or (isinstance(root, str) and not is_committed(files.join(root, name))):
            leftovers.append(files.join(root, name))
    for leftover in leftovers:
        files.remove_tree(leftover)
    return leftovers
