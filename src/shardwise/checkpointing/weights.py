"""Weights into a model, sharded or not, from any format: each rank reads its own part, checked before and while."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.checkpointing.agreeing.together import mesh_of_model, on_first, raise_over, together, together_with
from shardwise.checkpointing.contents import Box, Contents
from shardwise.checkpointing.formats.detect import open_checkpoint, require_names
from shardwise.checkpointing.hugging_face.layout import in_model_layout
from shardwise.checkpointing.loading.matching import Matched, match, rename_contents
from shardwise.checkpointing.loading.unusable import mark_unusable, mark_usable
from shardwise.checkpointing.reading.broadcasting import describe
from shardwise.checkpointing.reading.copies import find_differing_copy
from shardwise.checkpointing.reading.readers import FirstRankReader, OwnReader, Reader
from shardwise.checkpointing.reading.requests import Problem, Verify, check_requests
from shardwise.checkpointing.saving.staging import wait_for_copies
from shardwise.checkpointing.state.keys import KeyReport, Rename, canonical_name
from shardwise.checkpointing.state.slices import ModelTensor, model_tensors, parts_of, requests_for
from shardwise.errors import CheckpointError, ConfigError
from shardwise.progress import Progress
from shardwise.sharding.inventory import is_meta, take_inventory
from shardwise.sharding.materialize import allocate, materialize
from shardwise.sharding.replicas import values_of_ranks

T = TypeVar("T")


def load_weights(
    model: nn.Module,
    path: str | Path,
    strict: bool = True,
    rename: Rename | None = None,
    *,
    verify: Verify = "while",
    broadcast: bool = False,
    progress: Progress | None = None,
) -> KeyReport:
    """Load weights of any format into a model; each rank reads its own part and no more.

    Names, shapes, and that every byte is there are proven before anything is written. Tied tensors are loaded
    once, whichever of their names is stored. Prefixes that wrappers add (`module.`, `_orig_mod.` and the like)
    do not matter. A model on the meta device is given memory; what is not in the file (tables that are
    computed, missing tensors with `strict=False`) is then initialised as `materialize` does it.

    Args:
        model: Sharded by shardwise or by hand, or not at all; on meta or not.
        path: A safetensors file, a Hugging Face folder, a `torch.save` file, a Distributed Checkpoint folder, a
            checkpoint of FSDP1.
        strict: Raise unless every tensor of the model is there and every stored one has its place. Otherwise
            load what fits; shapes must fit all the same.
        rename: Stored names to the model's: `{"old.prefix": "new.prefix"}`, a compiled pattern for `re.sub`,
            or a function; None leaves a tensor out.
        verify: `while`: compare checksums as the bytes arrive; should they turn out corrupt, the model is marked
            and refuses to run until it is loaded again. `before`: read twice, and leave the model untouched.
        broadcast: Only the first rank opens the files, and sends the others what they need; for files that
            lie on one machine.
        progress: Is told the bytes that this rank reads.

    Returns:
        Which names were loaded, missing, unexpected, tied, renamed and cast.

    Raises:
        CheckpointError: With all names that do not fit; or the file that is damaged.

    Ranks:
        Collective over the ranks that hold the model. Every rank raises.
    """
    _check_verify(verify)
    mesh = mesh_of_model(model)
    reader = FirstRankReader(mesh) if broadcast else OwnReader()
    prepare = _prepare_from_first if broadcast else _prepare
    prepared = prepare(model, path, rename, mesh, strict)
    tensors, contents, matched = prepared.tensors, prepared.contents, prepared.matched
    if verify == "before":
        requests = requests_for(tensors, matched.stored_names)
        _together_with(reader, lambda: reader.verify(contents, requests), mesh)
    try:
        _read(model, tensors, contents, matched, reader, mesh, verify, progress)
    except Exception as error:
        mark_unusable(model, getattr(error, "where", "") or str(error))
        raise
    mark_usable(model)
    rebuilt = tuple(sorted({canonical_name(entry.fqn) for entry in take_inventory(model) if entry.pending}))
    if rebuilt:
        materialize(model)
    ignored = (*matched.report.ignored, *prepared.left_out)
    return dataclasses.replace(matched.report, rebuilt=rebuilt, ignored=ignored)


Opened = tuple[Contents, tuple[str, ...]]


def _open(model: nn.Module, tensors: Sequence[ModelTensor], path: str | Path, rename: Rename | None) -> Opened:
    """The checkpoint under the names that the model has for its tensors, and the names that were left out."""
    contents = open_checkpoint(path, model=model)
    require_names(contents, optimizers=False)
    renamed = contents if rename is None else rename_contents(contents, rename)
    kept = {tensor.name for tensor in renamed.tensors.values()}
    left_out = tuple(name for name, tensor in contents.tensors.items() if tensor.name not in kept)
    names = [name for tensor in tensors for name in tensor.names]
    return in_model_layout(renamed, model, names), left_out


@dataclasses.dataclass(frozen=True, slots=True)
class _Prepared:
    """A checkpoint that fits the model, as far as can be told before the first byte is read."""

    tensors: list[ModelTensor]
    contents: Contents
    matched: Matched
    left_out: tuple[str, ...]


def _prepare(
    model: nn.Module, path: str | Path, rename: Rename | None, mesh: DeviceMesh | None, strict: bool
) -> _Prepared:
    """Find whatever can be found wrong; every rank for itself, and then all hear of it at once."""

    def work() -> tuple[_Prepared, str]:
        tensors = model_tensors(model)
        contents, left_out = _open(model, tensors, path, rename)
        matched = _match(model, tensors, contents, strict)
        problems = check_requests(contents, requests_for(tensors, matched.stored_names))
        if problems:
            raise _unreadable(contents, problems)
        if strict and (error := _differing_copies(contents, matched, tensors, whole=False)) is not None:
            raise error
        return _Prepared(tensors, contents, matched, left_out), _digest(contents, matched)

    prepared, digests = together_with(work, mesh)
    _refuse_differing(digests, prepared.contents)
    return prepared


def _prepare_from_first(
    model: nn.Module, path: str | Path, rename: Rename | None, mesh: DeviceMesh | None, strict: bool
) -> _Prepared:
    """The same where only the first rank opens files and the others get a description."""
    tensors = together(lambda: model_tensors(model), mesh)
    opened: list[Opened] = []

    def open_and_describe() -> Opened:
        opened.append(_open(model, tensors, path, rename))
        return describe(opened[0][0]), opened[0][1]

    described = on_first(open_and_describe, mesh)
    contents, left_out = opened[0] if opened else described
    matched = together(lambda: _match(model, tensors, contents, strict), mesh)
    _refuse_differing(values_of_ranks(_digest(contents, matched), mesh), contents)
    requests = together(lambda: requests_for(tensors, matched.stored_names), mesh)
    problems = FirstRankReader(mesh).check(contents, requests)
    raise_over(mesh, _unreadable(contents, problems) if problems else None)
    if strict and matched.copies:
        raise_over(mesh, _differing_copies(contents, matched, tensors, whole=True))
    return _Prepared(tensors, contents, matched, left_out)


def _match(model: nn.Module, tensors: Sequence[ModelTensor], contents: Contents, strict: bool) -> Matched:
    matched = match(model, contents, tensors)
    if (error := matched.refuse(contents, strict)) is not None:
        raise error
    return matched


def _digest(contents: Contents, matched: Matched) -> str:
    lines = [
        f"{name} <- {stored} {contents.tensors[stored].dtype} {contents.tensors[stored].shape}"
        for name, stored in matched.stored_names.items()
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _refuse_differing(digests: Sequence[str], contents: Contents) -> None:
    """Every rank must read the same thing into the same model: a stale copy on one machine is easily missed."""
    if len(set(digests)) > 1:
        differing = [rank for rank, other in enumerate(digests) if other != digests[0]]
        raise CheckpointError(
            f"ranks {differing} find other weights, or have another model, than the first",
            where=str(contents.path),
            why="all ranks load parts of the same tensors",
            fix="put the same files on every machine, or pass broadcast=True to read those of the first",
        )


def _unreadable(contents: Contents, problems: Sequence[Problem]) -> CheckpointError:
    lines = [f"{problem.name}: {problem.text}" for problem in problems[:20]]
    return CheckpointError(
        f"the checkpoint cannot be loaded: {len(problems)} problems",
        where="\n".join([str(contents.path), *lines]),
        why="every byte must be there before the first is written into the model",
        fix="copy the checkpoint again, or load another one",
    )


def _differing_copies(
    contents: Contents, matched: Matched, tensors: Sequence[ModelTensor], *, whole: bool
) -> Exception | None:
    """The error for a tied tensor that is stored twice with different values."""
    for tensor in tensors:
        others = matched.copies.get(tensor.name)
        if not others or not contents.tensors[others[0]].pieces:  # a rank that reads nothing
            continue
        name = matched.stored_names[tensor.name]
        boxes = [Box.whole(tensor.shape)] if whole else [part.box for part in parts_of(tensor.tensor)]
        try:
            other = find_differing_copy(contents, name, others, boxes)
        except CheckpointError as error:
            return error
        if other is not None:
            return CheckpointError(
                f"{name!r} and {other!r} are stored with different values",
                where=str(contents.path),
                why="in this model they are one tensor, so one of the two would be lost",
                fix="untie them in the model's config, or choose one: rename={" + repr(other) + ": None}",
            )
    return None


def _read(
    model: nn.Module,
    tensors: Sequence[ModelTensor],
    contents: Contents,
    matched: Matched,
    reader: Reader,
    mesh: DeviceMesh | None,
    verify: Verify,
    progress: Progress | None,
) -> None:
    wait_for_copies()  # a save in the background may still be copying what is about to be overwritten
    wanted = [tensor.tensor for tensor in tensors if tensor.name in matched.stored_names]
    if any(map(is_meta, wanted)):
        allocate(model, wanted)
        tensors = model_tensors(model)  # recurrent layers have new ones
    requests = requests_for(tensors, matched.stored_names)
    _together_with(reader, lambda: reader.read(contents, requests, verify=verify != "no", progress=progress), mesh)


def _together_with(reader: Reader, work: Callable[[], T], mesh: DeviceMesh | None) -> T:
    """Fail alike; a reader that communicates does so by itself."""
    return together(work, mesh) if isinstance(reader, OwnReader) else work()


def _check_verify(verify: str) -> None:
    if verify not in ("while", "before", "no"):
        raise ConfigError(
            f"verify is {verify!r}", where="load_weights(verify=...)", fix='pass "while", "before" or "no"'
        )
