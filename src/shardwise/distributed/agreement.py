"""Failing together: every rank raises the same error, and no rank is left in a barrier."""

from __future__ import annotations

import difflib
import hashlib
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ShardError, ShardwiseError

T = TypeVar("T")
S = TypeVar("S")
Gather = Callable[[Any], list[Any]]
"""Gives every rank's value, by rank. Collective."""
_MAX_DIFF_LINES = 40


def on_rank_zero(work: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Run `work` on rank 0 and return its result, or raise its error, on every rank.

    Args:
        work: Takes nothing; its result must be picklable.
        group: The ranks that take part, of which the first does the work; default: all.

    Returns:
        What `work` returned. Ranks other than 0 hold a copy of it.

    Ranks:
        Collective. Nobody is left waiting for a rank 0 that has failed.
    """
    if not _is_distributed():
        return work()
    if dist.get_rank(group) != 0:
        return _result_of_rank_zero(group)
    try:
        result = work()
        message = pickle.dumps((True, result))
    except BaseException as error:  # DCP's CheckpointException is no Exception
        dist.broadcast_object_list([pickle.dumps((False, _portable(error)))], group_src=0, group=group)
        raise
    dist.broadcast_object_list([message], group_src=0, group=group)
    return result


def agree_on(
    value: str,
    what: str,
    *,
    fix: str = "",
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
) -> None:
    """Raise on every rank unless all hold the same `value`.

    Args:
        value: Printable, so that the difference can be shown line by line.
        what: What the value is, as in "the sharding plan".
        fix: What the reader should do; the default says to make the ranks run the same code.
        group: The ranks that take part; default: all.
        mesh: The ranks that take part, instead of `group`.

    Raises:
        ShardError: With the ranks that differ from rank 0 and the lines in which they do.

    Ranks:
        Collective. One small all-gather when the ranks agree.
    """
    if not _is_distributed():
        return
    gather: Gather = partial(gather_objects, group=group) if mesh is None else partial(gather_over_mesh, mesh)
    digests = gather(hashlib.sha256(value.encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    values = gather(value)
    raise ShardError(
        f"ranks do not hold the same value of {what}",
        where=f"ranks {differing} differ from rank 0",
        why=_difference(values[0], values[differing[0]], f"rank {differing[0]}"),
        fix=fix or "build the model and the config from the same code, files and seeds on every rank",
    )


def raise_together(error: BaseException | None, *, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank if any rank brings an error.

    A rank raises its own error where it has one; the others raise that of the first rank that has, under
    its number.

    Args:
        error: What went wrong here, or None.
        group: The ranks that take part; default: all.

    Ranks:
        Collective. Call it after local work that can fail, before the next collective.
    """
    raise_on_all(error, lambda value: gather_objects(value, group=group) if _is_distributed() else [value])


def raise_on_all(error: BaseException | None, gather: Gather, kind: type[ShardwiseError] = ShardError) -> None:
    """As `raise_together`, over the ranks that `gather` reaches.

    Args:
        error: What went wrong here, or None.
        gather: The ranks.
        kind: What the others raise for an error that is none of ours.
    """
    errors = gather(None if error is None else as_shardwise_error(error, kind))
    if error is not None:
        raise error
    if (failed := first_error(errors)) is not None:
        raise failed


def run_on_all(work: Callable[[], T], gather: Gather, kind: type[ShardwiseError] = ShardError) -> T:
    """Run `work` on every rank; if it fails on one, raise on all.

    Ranks:
        Collective over the ranks that `gather` reaches. `work` must not communicate.
    """
    return run_and_gather(lambda: (work(), None), gather, kind)[0]


def run_and_gather(
    work: Callable[[], tuple[T, S]], gather: Gather, kind: type[ShardwiseError] = ShardError
) -> tuple[T, list[S]]:
    """Run `work` on every rank; if it fails on one, raise on all. One exchange between the ranks instead of two.

    Args:
        work: Returns what this rank keeps, and a small value that all ranks get to know. Must not communicate.
        gather: The ranks.
        kind: What the others raise for an error that is none of ours.

    Returns:
        What this rank keeps, and every rank's value, by rank.

    Ranks:
        Collective over the ranks that `gather` reaches.
    """
    try:
        kept, told = work()
    except BaseException as error:  # DCP's CheckpointException is no Exception
        gather((as_shardwise_error(error, kind), None))
        raise
    told_by_all = gather((None, told))
    if (failed := first_error([error for error, _ in told_by_all])) is not None:
        raise failed
    return kept, [value for _, value in told_by_all]


def as_shardwise_error(error: BaseException, kind: type[ShardwiseError] = ShardError) -> ShardwiseError:
    """The error itself if it is one of ours, else one that says the same and can be sent to other ranks."""
    if isinstance(error, ShardwiseError):
        return error
    return kind(
        f"{type(error).__name__}: {error}",
        why="a step that every rank must finish failed on one of them",
        fix="see the traceback of the rank that raised it",
    )


def first_error(errors: Sequence[ShardwiseError | None]) -> ShardwiseError | None:
    """The first rank's error, under its number where there are several ranks."""
    for rank, error in enumerate(errors):
        if error is not None:
            what = f"rank {rank}: {error.what}" if len(errors) > 1 else error.what
            return type(error)(what, where=error.where or f"rank {rank}", why=error.why, fix=error.fix)
    return None


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _result_of_rank_zero(group: dist.ProcessGroup | None) -> T:
    message: list[bytes] = [b""]
    dist.broadcast_object_list(message, group_src=0, group=group)
    succeeded, outcome = pickle.loads(message[0])
    if succeeded:
        return outcome
    outcome.add_note("(raised on rank 0)")
    raise outcome


def gather_objects(value: T, *, group: dist.ProcessGroup | None = None) -> list[T]:
    """The value of every rank, in the order of the ranks.

    Args:
        value: Picklable.
        group: The ranks that take part; default: all.

    Ranks:
        Collective.
    """
    values: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values  # pyrefly: ignore[bad-return]  # every place is filled


def gather_over_mesh(mesh: DeviceMesh, value: T) -> list[T]:
    """The value of every rank of a mesh, in the mesh's order.
    Ranks:
        Collective over the mesh.
    """
    if dist.get_backend() == "fake":
        return [value] * mesh.size()  # rank 0 of a world that does not exist: benchmarks and estimates
    gathered = [value]
    for axis in reversed(range(mesh.ndim)):
        gathered = [item for part in gather_objects(gathered, group=mesh.get_group(axis)) for item in part]
    return gathered


def _portable(error: BaseException) -> BaseException:
    """The error itself if it survives a pickle round trip, else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return as_shardwise_error(error)
    return error


def _difference(ours: str, theirs: str, their_name: str) -> str:
    lines = list(difflib.unified_diff(ours.splitlines(), theirs.splitlines(), "rank 0", their_name, lineterm="", n=1))
    hidden = len(lines) - _MAX_DIFF_LINES
    return "\n".join(lines[:_MAX_DIFF_LINES] + ([f"... and {hidden} more lines"] if hidden > 0 else []))
