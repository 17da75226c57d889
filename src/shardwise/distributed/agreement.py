"""Agreement between ranks: values of all ranks, and errors that every rank raises, so that none waits in a barrier."""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import hashlib
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise import compat
from shardwise.errors import ShardError, ShardwiseError, listed

T = TypeVar("T")
S = TypeVar("S")
_MAX_DIFF_LINES = 40
_TIMEOUT = timedelta(hours=4)  # one rank's slow disk must not end the run


class Channel:
    """A separate gloo group of all ranks, or this process without a process group.

    Not thread-safe. Messages are pickled and trusted: they come from the ranks of this run. The constructor and all
    methods except `close` are collective; every rank must create its channels in the same order. `kind` is the class of
    the error for a missing or unreachable rank, and on other ranks for an error that is not a `ShardwiseError`.
    """

    def __init__(self, kind: type[ShardwiseError] = ShardError) -> None:
        self.rank, self.size, self._kind = 0, 1, kind
        self._group: Any = None
        self._store: Any = None
        self._num_arrivals = 0
        if dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake":
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size > 1:
            self._store = compat.private_store("shardwise/channels")
            self.arrive()
            self._group = compat.private_gloo_group(self._store, _TIMEOUT)

    def arrive(self) -> None:
        """Wait until every rank calls this; an error names the ranks missing after the process group's timeout.

        Call it first in public functions: the collectives after it have a timeout of hours.
        """
        if self._store is None:
            return
        self._num_arrivals += 1
        try:
            self._store.set(f"rank {self.rank}", str(self._num_arrivals))
            if self._store.add(f"arrived {self._num_arrivals}", 1) == self.size:
                self._store.set(f"all arrived {self._num_arrivals}", "")
            self._store.wait([f"all arrived {self._num_arrivals}"])
            missing = self._store.get("missing").decode() if self._store.check(["missing"]) else ""
        except RuntimeError as error:
            with self._reached():
                missing = str([rank for rank in range(self.size) if not self._has_arrived(rank)])
                self._store.set("missing", missing)  # for ranks that arrive later
            raise self._not_arrived(missing) from error
        if missing:
            raise self._not_arrived(missing)

    def all_gather(self, value: T) -> list[T]:
        """The value of every rank, by rank."""
        return self._gather(value, on_all=True)

    def gather(self, value: T) -> list[T]:
        """The value of every rank, by rank, on rank 0; an empty list on the others."""
        return self._gather(value, on_all=False)

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; if it fails on one, raise on all. `work` must not communicate.

        Ranks:
            Collective.
        """
        return run_on_all(work, self, self._kind)

    def close(self) -> None:
        """Destroy the group of this rank."""
        self._group = self._store = None

    def _has_arrived(self, rank: int) -> bool:
        key = f"rank {rank}"
        return self._store.check([key]) and int(self._store.get(key)) >= self._num_arrivals

    def _not_arrived(self, missing: str) -> ShardwiseError:
        return self._kind(
            f"ranks {missing} did not arrive within {self._store.timeout.total_seconds():.0f} s",
            where=f"rank {self.rank}",
            why="all ranks must make this call, or the others wait for them; the limit is the process group's timeout",
            fix="make the call on every rank, not only on rank 0; for slow ranks init_process_group(timeout=...)",
        )

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._kind(
                "the ranks cannot reach each other",
                where=str(error).splitlines()[0][:200],
                why="a rank ended or was killed before all ranks finished this call",
                fix="see the first error of the other ranks",
            ) from error

    def _gather(self, value: T, *, on_all: bool) -> list[T]:
        if self._group is None:
            return [value]
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        with self._reached():
            lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
            self._group.allgather([lengths], [torch.tensor([len(data)], device="cpu")]).wait()
            # On the CPU, regardless of the default device; padded with zeros, to send no uninitialized memory.
            sent = torch.zeros(int(max(lengths)), dtype=torch.uint8, device="cpu")
            sent[: len(data)] = data
            parts = [torch.empty_like(sent) for _ in range(self.size if on_all or self.rank == 0 else 0)]
            if on_all:
                self._group.allgather([parts], [sent]).wait()
            else:
                compat.gather_on(self._group, sent, parts)
        return [
            value if rank == self.rank else pickle.loads(ctypes.string_at(part.data_ptr(), int(length)))
            for rank, (part, length) in enumerate(zip(parts, lengths, strict=False))
        ]


Ranks = dist.ProcessGroup | DeviceMesh | Channel | None
"""The participating ranks; None: all ranks, or only this process if there is no process group."""


def gather_objects(value: T, *, group: Ranks = None) -> list[T]:
    """The picklable value of every rank, in the order of the group or mesh; collective."""
    if isinstance(group, Channel):
        return group.all_gather(value)
    if not _is_distributed():
        return [value]
    if dist.get_backend() == "fake":  # the other ranks do not exist: benchmarks and estimates
        return [value] * (group.size() if group is not None else dist.get_world_size())
    if isinstance(group, DeviceMesh):
        gathered = [value]
        for axis in reversed(range(group.ndim)):
            gathered = [item for part in gather_objects(gathered, group=group.get_group(axis)) for item in part]
        return gathered
    values: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values  # pyrefly: ignore[bad-return]  # no None is left


def gather_over_mesh(mesh: DeviceMesh | None, value: T) -> list[T]:
    """The value of every rank of a mesh, in the mesh's order; only this rank's without a mesh. Collective."""
    return [value] if mesh is None else gather_objects(value, group=mesh)


def flag_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the CPU if the backend supports it: reading a flag on a GPU waits for all queued work."""
    backends = dist.get_backend_config(group)
    if "cpu:" in str(backends) and "cpu:nccl" not in str(backends):
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator() or "cpu")


def is_first(mesh: DeviceMesh | None) -> bool:
    """Whether this rank is the mesh's first."""
    coordinate = mesh.get_coordinate() if mesh is not None else []
    return coordinate is not None and not any(coordinate)


def on_rank_zero(work: Callable[[], T], *, group: dist.ProcessGroup | DeviceMesh | None = None) -> T:
    """Run `work` on the first rank and return its result, or raise its error, on every rank.

    Collective: no rank waits for one that has failed. The result must be picklable.
    """
    if not _is_distributed():
        return work()
    groups = [group.get_group(axis) for axis in range(group.ndim)] if isinstance(group, DeviceMesh) else [group]
    sent, result, failure = [b""], None, None
    is_first = all(dist.get_rank(each) == 0 for each in groups)
    if is_first:
        try:
            result = work()
            sent = [pickle.dumps((result, None))]
        except BaseException as error:  # DCP's CheckpointException is not an Exception
            failure = error
            sent = [pickle.dumps((None, _portable(error)))]
    for each in groups:
        dist.broadcast_object_list(sent, group_src=0, group=each)
    if not is_first:
        result, failure = pickle.loads(sent[0])
        if failure is not None:
            failure.add_note("(raised on rank 0)")
    if failure is not None:
        raise failure
    return result  # pyrefly: ignore[bad-return]  # what `work` returned


def agree_on(value: str, what: str, *, fix: str = "", group: Ranks = None) -> None:
    """Raise a ShardError on every rank unless `value` is the same on all, with the lines that differ from rank 0's.

    `what` describes the value, as in "the sharding plan". Collective: one small all-gather if the ranks agree.
    """
    digests = gather_objects(hashlib.sha256(value.encode()).hexdigest(), group=group)
    if len(set(digests)) == 1:
        return
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    values = gather_objects(value, group=group)
    theirs = values[differing[0]].splitlines()
    lines = difflib.unified_diff(values[0].splitlines(), theirs, "rank 0", f"rank {differing[0]}", lineterm="", n=1)
    raise ShardError(
        f"ranks have different values of {what}",
        where=f"ranks {differing} differ from rank 0",
        why="\n".join(listed(list(lines), _MAX_DIFF_LINES)),
        fix=fix or "build the model and the config from the same code, files and seeds on every rank",
    )


def raise_on_all_ranks(
    error: BaseException | None, *, group: Ranks = None, kind: type[ShardwiseError] = ShardError
) -> None:
    """Raise on every rank if any rank passes an error; collective, after local work that can fail.

    A rank with an error raises its own; the other ranks raise the error of the first failed rank, with its number, and
    as `kind` if it is not a `ShardwiseError`.
    """

    def work() -> None:
        if error is not None:
            raise error

    run_on_all(work, group, kind)


def run_on_all(work: Callable[[], T], group: Ranks = None, kind: type[ShardwiseError] = ShardError) -> T:
    """Run `work`, which must not communicate, on every rank; if it fails on one, raise on all. Collective."""
    return run_and_gather(lambda: (work(), None), group, kind)[0]


def run_and_gather(
    work: Callable[[], tuple[T, S]], group: Ranks = None, kind: type[ShardwiseError] = ShardError
) -> tuple[T, list[S]]:
    """Run `work` on every rank; if it fails on one, raise on all. One exchange between the ranks instead of two.

    `work` must not communicate. It returns a result for this rank, and a small value to gather from all ranks.

    Ranks:
        Collective.
    """
    try:
        result, value = work()
    except BaseException as error:  # DCP's CheckpointException is not an Exception
        gather_objects((as_shardwise_error(error, kind), None), group=group)
        raise
    gathered = gather_objects((None, value), group=group)
    for rank, (error, _) in enumerate(gathered):
        if error is not None:
            what = f"rank {rank}: {error.what}" if len(gathered) > 1 else error.what
            raise type(error)(what, where=error.where or f"rank {rank}", why=error.why, fix=error.fix)
    return result, [value for _, value in gathered]


def as_shardwise_error(error: BaseException, kind: type[ShardwiseError] = ShardError) -> ShardwiseError:
    """Return the error if it is a ShardwiseError, else one with its message that can be sent to other ranks."""
    if isinstance(error, ShardwiseError):
        return error
    return kind(
        f"{type(error).__name__}: {error}",
        why="a collective operation failed on one rank",
        fix="see the traceback of the rank that raised it",
    )


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _portable(error: BaseException) -> BaseException:
    """Return the error if it can be pickled, else an equivalent one."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return as_shardwise_error(error)
    return error
