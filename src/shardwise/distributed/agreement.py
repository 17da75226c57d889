"""Failing together: every rank raises the same error, and no rank is left in a barrier."""

from __future__ import annotations

import difflib
import hashlib
import pickle
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ShardError, ShardwiseError

T = TypeVar("T")
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


def agree_on(value: str, what: str, *, fix: str = "", group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank unless all hold the same `value`.

    Args:
        value: Printable, so that the difference can be shown line by line.
        what: What the value is, as in "the sharding plan".
        fix: What the reader should do; the default says to make the ranks run the same code.
        group: The ranks that take part; default: all.

    Raises:
        ShardError: With the ranks that differ from rank 0 and the lines in which they do.

    Ranks:
        Collective. One small all-gather when the ranks agree.
    """
    if not _is_distributed():
        return
    digests = gather_objects(hashlib.sha256(value.encode()).hexdigest(), group=group)
    if len(set(digests)) == 1:
        return
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    values = gather_objects(value, group=group)
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
    if not _is_distributed():
        if error is not None:
            raise error
        return
    errors = gather_objects(None if error is None else pickle.dumps(_portable(error)), group=group)
    failed = [rank for rank, other in enumerate(errors) if other is not None]
    if error is not None:
        raise error
    if failed:
        raise _under_rank(failed[0], pickle.loads(errors[failed[0]] or b""))


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
        text = f"{type(error).__name__}: {error}"
        return ShardError(text, fix="see the traceback of the rank that raised it")
    return error


def _under_rank(rank: int, error: BaseException) -> ShardwiseError:
    if isinstance(error, ShardwiseError):
        return type(error)(f"rank {rank}: {error.what}", where=error.where, why=error.why, fix=error.fix)
    return ShardError(
        f"rank {rank}: {type(error).__name__}: {error}",
        where=f"rank {rank}",
        why="a step that every rank must finish failed on one of them",
        fix=f"see the traceback of rank {rank}",
    )


def _difference(ours: str, theirs: str, their_name: str) -> str:
    lines = list(difflib.unified_diff(ours.splitlines(), theirs.splitlines(), "rank 0", their_name, lineterm="", n=1))
    hidden = len(lines) - _MAX_DIFF_LINES
    return "\n".join(lines[:_MAX_DIFF_LINES] + ([f"... and {hidden} more lines"] if hidden > 0 else []))
