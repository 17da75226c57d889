"""Commit a checkpoint of our own format with one rename, and find the committed ones."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from shardwise.checkpointing.formats.sharded import (
    MANIFEST_NAME,
    METADATA_NAME,
    FileRecord,
    Header,
    manifest_bytes,
    torch_metadata,
)
from shardwise.checkpointing.storage.files import (
    Place,
    exists,
    join,
    make_folder,
    names_in,
    os_errors,
    place,
    remove_tree,
    size_of,
    split,
    sync_folder,
    write_small,
)
from shardwise.errors import CheckpointError

_STEP = re.compile(r"step-(\d{8,})")
_PARTIAL, _REMOVING = ".partial", ".removing"


def step_folder(root: str | Place, step: int) -> Place:
    """Where the checkpoint of a step lies under `root`."""
    return join(place(root), f"step-{step:08d}")


def partial_of(folder: Place) -> Place:
    """Where a checkpoint is written before it is committed; in an object store its own place."""
    return folder if isinstance(folder, str) else folder.with_name(folder.name + _PARTIAL)


def begin_checkpoint(folder: Place) -> Place:
    """Make the partial folder, empty, for a checkpoint that shall be called `folder`.

    Returns:
        The partial folder; every rank writes its file into it.

    Raises:
        CheckpointError: There is something of that name already.

    Ranks:
        Local: call it on rank 0, before any rank writes.
    """
    if is_committed(folder) or (isinstance(folder, Path) and exists(folder)):
        raise CheckpointError(
            f"there is a checkpoint called {split(folder)[1]} already",
            where=str(folder),
            why="a committed checkpoint is never written over",
            fix="save under another step or into another folder, or remove this one",
        )
    partial = partial_of(folder)
    remove_tree(partial)  # left over from a save that was interrupted
    make_folder(partial)
    return partial


def commit_checkpoint(folder: Place, records: Iterable[FileRecord], header: Header, *, fsync: bool = True) -> None:
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
    metadata = torch_metadata(records, aliases=header.aliases, structure=header.structure)
    manifest = manifest_bytes(folder, records, header, {METADATA_NAME: metadata})
    write_small(join(partial, METADATA_NAME), metadata, fsync=fsync)
    write_small(join(partial, MANIFEST_NAME), manifest, fsync=fsync)
    if isinstance(folder, str) or isinstance(partial, str):
        return
    if fsync:
        sync_folder(partial)
    with os_errors("give the checkpoint its name", folder):
        os.rename(partial, folder)
    if fsync:
        sync_folder(folder.parent)
        with contextlib.suppress(CheckpointError):  # the first save may have made the run's folder, in one not ours
            sync_folder(folder.parent.parent)


def is_committed(folder: Place) -> bool:
    """Whether a complete checkpoint of ours lies there."""
    if split(folder)[1].endswith((_PARTIAL, _REMOVING)):
        return False
    return size_of(join(folder, MANIFEST_NAME)) is not None


def committed_steps(root: str | Place) -> list[int]:
    """The steps of all committed checkpoints under `root`, in ascending order."""
    root = place(root)
    steps = [int(match.group(1)) for name in names_in(root) if (match := _STEP.fullmatch(name))]
    return sorted(step for step in steps if is_committed(step_folder(root, step)))


def remove_checkpoint(folder: Place) -> None:
    """Remove a checkpoint so that it is never seen half removed.

    Ranks:
        Local: call it on rank 0.
    """
    if isinstance(folder, str):
        remove_tree(join(folder, MANIFEST_NAME))
        remove_tree(folder)
    else:
        retired = folder.with_name(folder.name + _REMOVING)
        remove_tree(retired)
        with os_errors("remove the checkpoint", folder), contextlib.suppress(FileNotFoundError):
            os.rename(folder, retired)
        remove_tree(retired)


def sweep(root: str | Place) -> list[Place]:
    """Remove what interrupted saves and removals left under `root`; nothing may be saving there now.

    Returns:
        The places that were removed.

    Ranks:
        Local: call it on rank 0.
    """
    root = place(root)
    leftovers = []
    for name in names_in(root):
        bare = name.removesuffix(_PARTIAL).removesuffix(_REMOVING)
        if _STEP.fullmatch(bare) is None:
            continue
        if bare != name or (isinstance(root, str) and not is_committed(join(root, name))):
            leftovers.append(join(root, name))
    for leftover in leftovers:
        remove_tree(leftover)
    return leftovers
