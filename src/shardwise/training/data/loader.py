"""The order of samples over all ranks, and the loaders that hand out batches for training and evaluation."""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import CheckpointError, ShardError
from shardwise.training.data.samples import IGNORED, Batch, Samples, Tokenizer

_NUM_ROUNDS = 8  # of which small epochs need some more than large ones to reach all their permutations
_MASK = 0xFFFFFFFF
_FACTOR = 0x45D9F3B  # odd, and small enough that 32 bits times it stay positive in 64


def shuffled(positions: Tensor, num_samples: int, *, seed: int, epoch: int) -> Tensor:
    """Where each position of a shuffled epoch finds its sample: a permutation of range(num_samples).

    A keyed Feistel network permutes the numbers below a product that is hardly larger than `num_samples`; one that
    lands beyond is sent through again until it lands within. So a permutation of 10^8 samples takes no memory.

    Args:
        positions: int64, each in range(num_samples).
        num_samples: Size of the epoch.
        seed: Of the run.
        epoch: Another epoch is another permutation.

    Ranks:
        Local. The same everywhere.
    """
    num_low = math.isqrt(num_samples - 1) + 1
    num_high = -(-num_samples // num_low)
    keys = _round_keys(seed, epoch)
    result = _encrypt(positions, num_low, num_high, keys)
    while bool((outside := result >= num_samples).any()):
        result[outside] = _encrypt(result[outside], num_low, num_high, keys)
    return result


def samples_at(positions: Tensor, num_samples: int, *, seed: int, shuffle: bool) -> Tensor:
    """The samples at these positions of all epochs in a row."""
    within = positions % num_samples
    if not shuffle:
        return within
    epochs = positions // num_samples
    for epoch in range(int(epochs.min()), int(epochs.max()) + 1):
        chosen = epochs == epoch
        within[chosen] = shuffled(within[chosen], num_samples, seed=seed, epoch=epoch)
    return within


def _encrypt(values: Tensor, num_low: int, num_high: int, keys: list[int]) -> Tensor:
    """One pass of the network over range(num_low * num_high): each half in turn is moved by a hash of the other."""
    low, high = values % num_low, values // num_low
    for index, key in enumerate(keys):
        if index % 2 == 0:
            high = (high + _hash(low, key)) % num_high
        else:
            low = (low + _hash(high, key)) % num_low
    return high * num_low + low


def _hash(values: Tensor, key: int) -> Tensor:
    """32 well-mixed bits of each value."""
    mixed = ((values ^ key) * _FACTOR) & _MASK
    mixed = ((mixed ^ (mixed >> 16)) * _FACTOR) & _MASK
    return mixed ^ (mixed >> 16)


def _round_keys(seed: int, epoch: int) -> list[int]:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=4 * _NUM_ROUNDS).digest()
    return [int.from_bytes(digest[start : start + 4], "little") for start in range(0, len(digest), 4)]


_BLOCK_BATCHES = 32


class Loader(Iterator[Batch]):
    """Endless batches. From `open_data`.

    Global batch k is samples [k * batch_size, (k + 1) * batch_size) of all shuffled epochs in a row, and each
    rank takes its contiguous part of it: on any number of ranks, the same samples are learnt in the same steps.

    An error of a worker is raised by the `next` that would have returned its batch, on this rank only: a loop on
    several ranks passes it to `raise_together` (or iterates through `lockstep`) before the step's first collective.
    The position has not moved then, and the next `next` tries the batch again.

    Args:
        samples: What batches are made of.
        num_samples: The first so many of them are an epoch.
        tokenizer: What made their tokens, if it is known.
        batch_size: Rows of a batch, over all ranks; a multiple of `num_ranks`.
        rank: Of this loader, among those that see different data.
        num_ranks: How many there are.
        seed: Of the order.
        shuffle: Another order every epoch; else as they lie.
        device: Where batches go.
        workers: Threads; 0 makes batches when asked.
        prefetch: Batches held ready for each worker.
        fingerprint: What the data is, part by part; a state of other data is refused.

    Ranks:
        Local. Ranks with the same data, seed and position hand out parts of the same global batch.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        num_samples: int,
        tokenizer: Tokenizer | None,
        batch_size: int,
        rank: int,
        num_ranks: int,
        seed: int,
        shuffle: bool,
        device: torch.device | str,
        workers: int,
        prefetch: int,
        fingerprint: Mapping[str, Any],
    ) -> None:
        self.samples, self.num_samples, self.tokenizer = samples, num_samples, tokenizer
        self.fingerprint = dict(fingerprint)
        self._batch_size, self._rank, self._num_ranks = batch_size, rank, num_ranks
        self._seed, self._shuffle = seed, shuffle
        self._device = with_index(device)
        self._workers, self._depth = workers, workers * prefetch
        self._position = self._origin = 0
        self._block: tuple[int | None, Tensor] = (None, torch.empty(0))
        self._lock = Lock()
        self._wait_s = 0.0
        self._pool: ThreadPoolExecutor | None = None
        self._ready: deque[Future[Batch]] = deque()
        self._closed = False

    def __next__(self) -> Batch:
        """This rank's rows of the next global batch, on the device."""
        if self._closed:
            raise ShardError("the loader is closed", why="its threads have ended", fix="open the data again")
        started = time.perf_counter()
        try:
            batch = self._upcoming()
        except BaseException:
            self._drop_ready()  # those behind the failed one would be handed out in its place
            raise
        finally:
            self._wait_s += time.perf_counter() - started
        self._position += self._batch_size
        return to_device(batch, self._device)

    @property
    def wait_s(self) -> float:
        """Seconds that `next` waited for a batch since this was last read."""
        waited, self._wait_s = self._wait_s, 0.0
        return waited

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0."""
        return self._position // self.num_samples

    def skip(self, batches: int) -> None:
        """Go on so many global batches later."""
        self._move_to(self._position + batches * self._batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Position and identity of the data, as plain values; the same on every rank."""
        return {
            "samples": self._position,
            "epoch": self.epoch,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": dict(self.fingerprint),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the last batch that was handed out when `state` was taken, on any number of ranks.

        Raises:
            CheckpointError: The state is of other data or another order.
        """
        now, then = _flat(self.state_dict()), _flat(state)
        changed = [name for name in now if now[name] != then.get(name)]
        if changed:
            raise CheckpointError(
                "the checkpoint was written while training on other data",
                where="\n".join(f"{name}: {then.get(name, 'nothing')} then, {now[name]} now" for name in changed),
                why="the samples not yet seen are known only for the same data in the same order",
                fix="resume with the data settings of that run, or start a new run from its weights: "
                "set weights to the checkpoint, folder to another",
            )
        self._move_to(int(state["samples"]))

    def close(self) -> None:
        """End the threads. Batches that were made ahead are dropped."""
        self._closed = True
        self._drop_ready()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _upcoming(self) -> Batch:
        if not self._workers:
            return self._make(self._position)
        if self._pool is None:
            self._pool = start_threads(self._workers, self._device)
        while len(self._ready) <= self._depth:
            first = self._position + len(self._ready) * self._batch_size
            self._ready.append(self._pool.submit(self._make, first))
        batch = self._ready[0].result()
        self._ready.popleft()
        return batch

    def _make(self, position: int) -> Batch:
        """This rank's part of the global batch that begins at `position`."""
        try:
            batch = self.samples.batch(self._indices(position))
        except Exception as error:
            error.add_note(f"(while making the batch of samples {position} to {position + self._batch_size - 1})")
            raise
        return pinned(batch, self._device)

    def _indices(self, position: int) -> Tensor:
        """This rank's samples of that batch; many batches' are found at once, which costs hardly more than one's."""
        block, within = divmod((position - self._origin) // self._batch_size, _BLOCK_BATCHES)
        with self._lock:
            if block != self._block[0]:
                self._block = (block, self._indices_of_block(block))
            return self._block[1][within]

    def _indices_of_block(self, block: int) -> Tensor:
        share = self._batch_size // self._num_ranks
        first = self._origin + block * _BLOCK_BATCHES * self._batch_size + self._rank * share
        batches = torch.arange(_BLOCK_BATCHES) * self._batch_size
        positions = first + batches[:, None] + torch.arange(share)
        return samples_at(positions, self.num_samples, seed=self._seed, shuffle=self._shuffle)

    def _move_to(self, position: int) -> None:
        self._drop_ready()
        with self._lock:
            self._position = self._origin = position
            self._block = (None, torch.empty(0))

    def _drop_ready(self) -> None:
        for future in self._ready:
            future.cancel()
        self._ready.clear()


def with_index(device: torch.device | str) -> torch.device:
    """`cuda` as the GPU that is current here, which in another thread would be the first."""
    device = torch.device(device)
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def start_threads(number: int, device: torch.device) -> ThreadPoolExecutor:
    """Threads that make batches for `device`.

    Pinning memory opens a context on the thread's current GPU: without a word it would be the first one, for all
    the ranks of a machine.
    """
    index = device.index
    prepare = (
        (lambda: None) if index is None or device.type == "cpu" else lambda: torch.accelerator.set_device_index(index)
    )
    return ThreadPoolExecutor(number, thread_name_prefix="shardwise-data", initializer=prepare)


def pinned(batch: Batch, device: torch.device) -> Batch:
    """The batch where a GPU can fetch it by itself; as it is for the CPU."""
    if device.type == "cpu":
        return batch
    return {name: value.pin_memory() for name, value in batch.items()}


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device; the copy is queued there, nobody waits for it."""
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}


def _flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be the same, by the names of the settings."""
    parts = {"seed": state.get("seed"), "data.shuffle": state.get("shuffle")}
    return parts | {f"data.{name}": value for name, value in dict(state.get("fingerprint") or {}).items()}


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
