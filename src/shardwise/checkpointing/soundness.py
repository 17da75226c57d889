"""Is what a checkpoint says about itself possible? Every element stored once, and no two states the same bytes.

Before 0.2.0 optimizer state could be stored wrong when ranks listed parameters in different orders (groups built from
Python sets). `mixed_order` and `unsure_order` recognise such checkpoints; the model in them is right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardwise.checkpointing.contents import Box, Contents, StoredTensor
from shardwise.checkpointing.reading.coverage import coverage_problem
from shardwise.checkpointing.storage import files
from shardwise.errors import CheckpointError
from shardwise.findings import Finding, Severity

INCOMPLETE, SHARED_STATE, WRONG_FILE, MIXED_ORDER, UNSURE_ORDER = "SW331", "SW332", "SW333", "SW337", "SW338"
USE_THE_MODEL = "the model is whole: load it alone, without optimizers=, and let the optimizer start afresh"
_MAX_LISTED = 20
_PARAMS = re.compile(r"(?:per_rank\.(\d+)\.)?(.+)\.param_groups\.(\d+)\.params")


def unsound(contents: Contents) -> Iterator[Finding]:
    """What is impossible in the index of a checkpoint; nothing of the tensors is read.

    Ranks:
        Local.
    """
    mixed = mixed_order(contents)
    for prefix, text in mixed.items():
        yield Finding(
            code=MIXED_ORDER,
            message=text,
            where=f"{contents.path}: {prefix}",
            severity=Severity.ERROR,
            fix=USE_THE_MODEL,
        )
    for prefix, text in unsure_order(contents).items():
        yield Finding(
            code=UNSURE_ORDER,
            message=text,
            where=f"{contents.path}: {prefix}",
            severity=Severity.WARNING,
            fix=f"if that was so, {USE_THE_MODEL}",
        )
    for name, tensor in contents.tensors.items():
        if name.startswith(tuple(f"{prefix}.state." for prefix in mixed)):
            continue
        if problem := _problem(tensor):
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


def mixed_order(contents: Contents) -> dict[str, str]:
    """Optimizers in a sharded checkpoint that lost state because ranks listed parameters in different orders.

    Their shards are stored by name and right, but plain tensors (`step`) were written by two ranks, or by none.

    Returns:
        By the optimizer's name in the checkpoint, what happened to it.

    Ranks:
        Local.
    """
    if contents.format != "sharded":
        return {}
    found: dict[str, str] = {}
    for prefix, lists in _listed_parameters(contents).items():
        first = [name for _, names in sorted(lists.get(None, {}).items()) for name in names]
        others = [group for rank, groups in lists.items() if rank is not None for group in groups.values()]
        if not others or any(name not in first for group in others for name in group):
            continue
        start = f"{prefix}.state."
        stored = [name for name in contents.tensors if name.startswith(start)]
        twice = [name for name in stored if _problem(contents.tensors[name])]
        keys = {name.rpartition(".")[2] for name in twice}
        having = {name.removeprefix(start).rpartition(".")[0] for name in stored}
        wanted = [f"{start}{name}.{key}" for name in first if name in having for key in keys]
        lost = [name for name in wanted if name not in contents.tensors]
        if twice:
            found[prefix] = (
                "ranks listed the optimizer's parameters in different orders when it was saved (shardwise before "
                f"0.2.0): {len(twice)} of its entries were stored twice and {len(lost)} not at all"
            )
    return found


def unsure_order(contents: Contents) -> dict[str, str]:
    """Optimizers in a full file of ours whose moments may belong to other parameters.

    Before 0.2.0 they were gathered in each rank's own order, and the file does not say whether ranks had the same.
    Since then parameters stand in the model's order.

    Returns:
        By the optimizer's name in the checkpoint, what may have happened to it.

    Ranks:
        Local.
    """
    is_ours = contents.format == "full" and contents.details.get("has_our_names")
    if not is_ours or contents.world_size is not None:  # converted: from a checkpoint that goes by names
        return {}
    model = [name.removeprefix("model.") for name in contents.tensors if name.startswith("model.")]
    place = {name: index for index, name in enumerate(model)}
    found: dict[str, str] = {}
    for prefix, lists in _listed_parameters(contents).items():
        for names in lists.get(None, {}).values():
            places = [place[name] for name in names if name in place]
            if places != sorted(places):
                found[prefix] = (
                    "the optimizer's parameters do not stand in the model's order: written by shardwise before 0.2.0, "
                    "which mixed up moments if ranks listed parameters in different orders (groups built from sets)"
                )
    return found


def _listed_parameters(contents: Contents) -> dict[str, dict[str | None, dict[int, list[str]]]]:
    """By optimizer, by rank where it differed from rank 0 (else None), by group: names of parameters."""
    listed: dict[str, dict[str | None, dict[int, list[str]]]] = {}
    for name, value in contents.values.items():
        if (match := _PARAMS.fullmatch(name)) and isinstance(value, (list, tuple)):
            rank, prefix, group = match.groups()
            listed.setdefault(prefix, {}).setdefault(rank, {})[int(group)] = [str(each) for each in value]
    return listed


def _problem(tensor: StoredTensor) -> str:
    return coverage_problem(Box.whole(tensor.shape), (piece.box for piece in tensor.pieces))


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
