"""Is what a checkpoint says about itself possible? Every element stored once, and no two states the same bytes."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.checkpointing.contents import Box, Contents
from shardwise.checkpointing.reading.coverage import coverage_problem
from shardwise.checkpointing.storage import files
from shardwise.errors import CheckpointError
from shardwise.findings import Finding, Severity

INCOMPLETE, SHARED_STATE, WRONG_FILE = "SW331", "SW332", "SW333"
_MAX_LISTED = 20


def unsound(contents: Contents) -> Iterator[Finding]:
    """What is impossible in the index of a checkpoint; nothing of the tensors is read.

    Ranks:
        Local.
    """
    for name, tensor in contents.tensors.items():
        if problem := coverage_problem(Box.whole(tensor.shape), (piece.box for piece in tensor.pieces)):
            yield Finding(
                code=INCOMPLETE,
                message=f"{name} is not stored whole: {problem}",
                where=str(contents.path),
                severity=Severity.ERROR,
                fix="copy the checkpoint again with the files of all ranks, or use another",
            )
    yield from _shared_states(contents)


def refuse_unsound(contents: Contents) -> None:
    """Raise if anything is impossible.

    Raises:
        CheckpointError: With everything that was found.

    Ranks:
        Local.
    """
    found = list(unsound(contents))
    if not found:
        return
    lines = [finding.message for finding in found[:_MAX_LISTED]]
    hidden = len(found) - len(lines)
    raise CheckpointError(
        f"the checkpoint is not whole: {len(found)} problem{'s' if len(found) > 1 else ''}",
        where=str(contents.path),
        why="\n".join([*lines, *([f"... and {hidden} more"] if hidden else [])]),
        fix=found[0].fix,
    )


def _shared_states(contents: Contents) -> Iterator[Finding]:
    """Two states of one parameter that are the same bytes: the later one overwrote the earlier.

    FSDP1's FULL optimizer state dict does that with `use_orig_params=True` unless it copies to another device: every
    state is gathered into the same buffer.
    """
    seen: dict[tuple[object, ...], str] = {}
    shared: list[tuple[str, str]] = []
    for name, tensor in contents.tensors.items():
        path = contents.structure.get(name, ())
        if len(path) < 3 or path[-3] != "state" or tensor.num_bytes <= 8 or len(tensor.pieces) != 1:
            continue
        piece = tensor.pieces[0]
        first = seen.setdefault((path[:-1], piece.file, piece.offset, id(piece.data)), name)
        if first != name:
            shared.append((first, name))
    if shared:
        yield Finding(
            code=SHARED_STATE,
            message=f"{shared[0][0]} and {shared[0][1]} are the same bytes (so are {len(shared) - 1} other pairs of "
            "optimizer state): of each pair at least one is lost",
            where=str(contents.path),
            severity=Severity.ERROR,
            fix="save the optimizer again with SHARDED_STATE_DICT (FSDP1's FULL one is wrong on CPU with "
            "use_orig_params=True), or convert the model alone, to safetensors",
        )


def wrong_files(contents: Contents) -> Iterator[Finding]:
    """Files that are missing, or not as large as they were.

    Ranks:
        Local.
    """
    for file in file_names(contents):
        path = files.join(contents.folder, file)
        size, expected = files.size_of(path), contents.file_bytes.get(file)
        if size is None or (expected is not None and size != expected):
            state = "is missing" if size is None else f"has {size:,} bytes, but {expected:,} were written"
            yield Finding(
                code=WRONG_FILE,
                message=f"the file {state}",
                where=str(path),
                severity=Severity.ERROR,
                fix="copy the checkpoint again, or use another",
            )


def file_names(contents: Contents) -> list[str]:
    """Every file that the contents lie in, relative to the folder."""
    used = (piece.file for tensor in contents.tensors.values() for piece in tensor.pieces if piece.file)
    return list(dict.fromkeys([*contents.file_bytes, *used]))
