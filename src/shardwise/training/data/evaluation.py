"""Held-out data: every sample once, and as many batches on each rank as on any other."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from shardwise.training.data.loader import pinned, start_threads, to_device, with_index
from shardwise.training.data.samples import IGNORED, Batch, Samples

_AHEAD = 3


class Evaluation:
    """A finite run over samples, which can be made again and again. From `open_evaluation`.

    The last batch is filled up with rows whose labels are all ignored: no rank waits for another, and no sample
    counts twice. Where batches have no labels there is nothing to ignore; there the last batch is smaller, and
    the fewer than `num_ranks` samples that would be left of it are left out.

    Args:
        samples: What batches are made of.
        first: The first that is held out.
        last: The one behind the last.
        batch_size: Rows of a batch, over all ranks.
        rank: Of this one.
        num_ranks: How many there are.
        device: Where batches go.
        threads: 0 makes batches when asked.

    Ranks:
        Local. Each rank gets its part of the same batches.
    """

    def __init__(
        self,
        samples: Samples,
        first: int,
        last: int,
        *,
        batch_size: int,
        rank: int,
        num_ranks: int,
        device: torch.device | str,
        threads: int = 1,
    ) -> None:
        self.num_samples = last - first
        self._samples, self._first, self._last = samples, first, last
        self._batch_size, self._share, self._rank, self._num_ranks = (
            batch_size,
            batch_size // num_ranks,
            rank,
            num_ranks,
        )
        self._device, self._threads = with_index(device), threads
        self._has_labels: bool | None = None

    def __len__(self) -> int:
        """Batches; as many on each rank."""
        whole, rest = divmod(self.num_samples, self._batch_size)
        enough = rest if self._labelled() else rest // self._num_ranks
        return whole + (enough > 0)

    def __iter__(self) -> Iterator[Batch]:
        positions = range(len(self))
        if not self._threads:
            yield from (to_device(self._make(position), self._device) for position in positions)
            return
        # A generator that is dropped halfway is closed, which leaves the `with` and so ends the thread.
        with start_threads(1, self._device) as pool:
            ready = deque(pool.submit(self._make, position) for position in positions[:_AHEAD])
            try:
                for position in positions:
                    batch = ready.popleft().result()
                    ready.extend(pool.submit(self._make, later) for later in positions[position + _AHEAD :][:1])
                    yield to_device(batch, self._device)
            finally:
                for future in ready:
                    future.cancel()

    def _make(self, position: int) -> Batch:
        begin = self._first + position * self._batch_size
        num_rows = min(self._batch_size, self._last - begin)
        share = self._share if self._labelled() else num_rows // self._num_ranks
        rows = torch.arange(share) + self._rank * share
        filler = rows >= num_rows
        batch = self._samples.batch((rows + begin).masked_fill(filler, begin))
        if bool(filler.any()):
            # Not in place: labels may lie in the same memory as the tokens.
            batch["labels"] = batch["labels"].masked_fill(filler[:, None], IGNORED)
        return pinned(batch, self._device)

    def _labelled(self) -> bool:
        if self._has_labels is None:
            self._has_labels = "labels" in self._samples.batch(torch.tensor([self._first]))
        return self._has_labels
