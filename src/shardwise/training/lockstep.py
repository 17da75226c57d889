"""Feeding ranks in step: all of them get a batch, or none does."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from shardwise.ranks import raise_together

Batch = TypeVar("Batch")

_HAS_BATCH, _IS_EMPTY, _HAS_FAILED = 0, 1, 2


def lockstep(loader: Iterable[Batch], *, group: dist.ProcessGroup | None = None) -> Iterator[Batch]:
    """Iterate over `loader` until the first rank has run out, on every rank.

    Each forward of a sharded model is a collective: a rank with one batch more than the others would wait.
    What is left over on ranks with more batches is dropped. The loader is read one batch ahead, so that the
    ranks' agreement on the next batch travels while they compute on this one.

    Args:
        loader: This rank's batches.
        group: The ranks that stop together; default: all.

    Raises:
        Exception: What a loader raised; on the other ranks, an error that names the rank where it happened.

    Ranks:
        Collective. One all-reduce of a scalar per batch, through CPU memory where the backend can.
    """
    if not dist.is_initialized():
        yield from loader
        return
    batches = iter(loader)
    device = _flag_device(group)
    current = _fetch(batches, device, group)
    while current.settle() == _HAS_BATCH:
        batch, current = current.batch, _fetch(batches, device, group)
        yield batch  # pyrefly: ignore[invalid-yield]  # every rank has one, so this one has
        del batch
    if current.settle() == _HAS_FAILED:
        raise_together(current.error, group=group)


@dataclass(slots=True)
class _Upcoming(Generic[Batch]):
    """This rank's next batch, and what the ranks are about to agree on."""

    batch: Batch | None
    error: Exception | None
    flag: torch.Tensor
    work: dist.Work | None

    def settle(self) -> int:
        """The worst that any rank reports."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return int(self.flag.item())


def _fetch(batches: Iterator[Batch], device: torch.device, group: dist.ProcessGroup | None) -> _Upcoming[Batch]:
    batch, error, status = None, None, _HAS_BATCH
    try:
        batch = next(batches)
    except StopIteration:
        status = _IS_EMPTY
    except Exception as caught:
        status, error = _HAS_FAILED, caught
    flag = torch.tensor(status, dtype=torch.int32, device=device)
    work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=group, async_op=True)
    return _Upcoming(batch, error, flag, work)


def _flag_device(group: dist.ProcessGroup | None) -> torch.device:
    """CPU if the backend can send from it: asking a GPU for the flag would wait for all work queued there."""
    backends = dist.get_backend_config(group)
    if "cpu:" in str(backends) and "cpu:nccl" not in str(backends):
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator() or "cpu")
