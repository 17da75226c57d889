"""The order of samples over all ranks, and the loaders of training and evaluation batches."""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise.config.load import check_ranges
from shardwise.config.run import DataConfig
from shardwise.errors import CheckpointError, ConfigError, ShardError, raise_listed
from shardwise.progress import Progress
from shardwise.training.data.reading import open_samples
from shardwise.training.data.samples import IGNORED, Batch, Samples, Tokenizer

T = TypeVar("T")

_NUM_ROUNDS = 8  # small epochs need more rounds than large ones to reach all permutations
_MASK = 0xFFFFFFFF
_FACTOR = 0x45D9F3B  # odd; its product with any 32-bit number is positive in int64


def shuffled(positions: Tensor, num_samples: int, *, seed: int, epoch: int) -> Tensor:
    """Return the samples at these positions of a shuffled epoch: a permutation of range(num_samples).

    A keyed Feistel network permutes a range that is slightly larger than `num_samples`; results outside the epoch are
    permuted again until they are inside. So a permutation of 10^8 samples takes no memory, and is the same on every
    rank.
    """
    num_low = math.isqrt(num_samples - 1) + 1
    num_high = -(-num_samples // num_low)
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=4 * _NUM_ROUNDS).digest()
    keys = [int.from_bytes(digest[start : start + 4], "little") for start in range(0, len(digest), 4)]
    result = _encrypt(positions, num_low, num_high, keys)
    while bool((outside := result >= num_samples).any()):
        result[outside] = _encrypt(result[outside], num_low, num_high, keys)
    return result


def samples_at(positions: Tensor, num_samples: int, *, seed: int, shuffle: bool) -> Tensor:
    """Return the samples at these positions of the sequence of all epochs."""
    within = positions % num_samples
    if not shuffle:
        return within
    epochs = positions // num_samples
    for epoch in range(int(epochs.min()), int(epochs.max()) + 1):
        chosen = epochs == epoch
        within[chosen] = shuffled(within[chosen], num_samples, seed=seed, epoch=epoch)
    return within


def _encrypt(values: Tensor, num_low: int, num_high: int, keys: list[int]) -> Tensor:
    """One pass of the network over range(num_low * num_high): each half is shifted by a hash of the other."""
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


_BLOCK_BATCHES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Rows of this rank in every global batch."""

    batch_size: int
    """Rows of a batch over all ranks; a multiple of `num_ranks`."""
    rank: int
    """Data-parallel rank."""
    num_ranks: int
    device: torch.device | str
    """Device of the batches."""

    def of(self, num_rows: int) -> Tensor:
        """The rows of this rank, from 0, of a batch of `num_rows` over all ranks."""
        own = num_rows // self.num_ranks
        return torch.arange(own) + self.rank * own


@dataclass(eq=False)
class Loader(Iterator[Batch], AbstractContextManager["Loader"]):
    """An endless iterator over batches, returned by `open_data`.

    Global batch k is samples [k * batch_size, (k + 1) * batch_size) of the concatenated shuffled epochs, and each
    rank takes a contiguous part of it: the samples of a step do not depend on the number of ranks.

    An error of a worker is raised by the `next` that would have returned its batch, on this rank only: with several
    ranks, pass it to `raise_on_all_ranks` (or iterate through `lockstep`) before the step's first collective. The
    position is unchanged then, and calling `next` again retries the batch.
    """

    samples: Samples
    """Samples that batches are made of."""
    share: Share
    config: DataConfig
    """Shuffling, workers and prefetching."""
    _: KW_ONLY
    num_samples: int
    """Number of samples in an epoch, counted from the first."""
    tokenizer: Tokenizer | None
    """Tokenizer of the data, if known."""
    seed: int
    """Seed of the sample order."""
    fingerprint: Mapping[str, Any]
    """Identity of the data, by setting; a state of other data cannot be loaded."""
    _position: int = field(default=0, init=False)
    _wait_s: float = field(default=0.0, init=False)
    _batches: Generator[Batch, None, None] | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    def __next__(self) -> Batch:
        """This rank's rows of the next global batch, on the device."""
        if self._closed:
            raise ShardError("the loader is closed", why="its threads have ended", fix="open the data again")
        if self._batches is None:
            workers = self.config.workers
            ahead = workers * self.config.prefetch
            self._batches = prefetched(self._make, self._upcoming(), workers, ahead, self.share.device)
        started = time.perf_counter()
        try:
            batch = next(self._batches)
        except BaseException:
            self._batches = None  # a generator that has raised is exhausted
            raise
        finally:
            self._wait_s += time.perf_counter() - started
        self._position += self.share.batch_size
        return batch

    def take_wait_s(self) -> float:
        """Return the seconds that `next` waited for a batch since the last call."""
        waited, self._wait_s = self._wait_s, 0.0
        return waited

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0."""
        return self._position // self.num_samples

    def skip(self, batches: int) -> None:
        """Skip this number of global batches."""
        self._move_to(self._position + batches * self.share.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Position and identity of the data, as plain values; the same on every rank."""
        return {
            "samples": self._position,
            "epoch": self.epoch,
            "seed": self.seed,
            "shuffle": self.config.shuffle,
            "fingerprint": dict(self.fingerprint),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last batch before `state_dict`, on any number of ranks; an error for other data."""
        now, then = _identity(self.state_dict()), _identity(state)
        raise_listed(
            [
                f"{name}: {then.get(name, 'nothing')} then, {now[name]} now"
                for name in now
                if now[name] != then.get(name)
            ],
            "the checkpoint was written while training on other data",
            why="the position in the data is only valid for the same data in the same order",
            fix="resume with the data settings of that run, or start a new run from its weights: "
            "set weights to the checkpoint, folder to another",
            kind=CheckpointError,
        )
        self._move_to(int(state["samples"]))

    def close(self) -> None:
        """End the threads and drop prefetched batches."""
        self._closed = True
        self._move_to(self._position)

    def __exit__(self, *error: object) -> None:
        self.close()

    def _move_to(self, position: int) -> None:
        if self._batches is not None:
            self._batches.close()
        self._position, self._batches = position, None

    def _upcoming(self) -> Iterator[tuple[int, Tensor]]:
        """Yield position and samples of this rank for each following batch, computed for many batches at once."""
        batch_size, shuffle = self.share.batch_size, self.config.shuffle
        own = self.share.of(batch_size)
        for first in itertools.count(self._position, _BLOCK_BATCHES * batch_size):
            starts = first + torch.arange(_BLOCK_BATCHES) * batch_size
            indices = samples_at(starts[:, None] + own, self.num_samples, seed=self.seed, shuffle=shuffle)
            yield from zip(starts.tolist(), indices, strict=True)

    def _make(self, item: tuple[int, Tensor]) -> Batch:
        position, indices = item
        try:
            return self.samples.batch(indices)
        except Exception as error:
            last = position + self.share.batch_size - 1
            error.add_note(f"(while making the batch of samples {position} to {last})")
            raise


def _identity(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that must not change on resume."""
    parts = {"seed": state.get("seed"), "data.shuffle": state.get("shuffle")}
    return parts | {f"data.{name}": value for name, value in dict(state.get("fingerprint") or {}).items()}


def prefetched(
    make: Callable[[T], Batch], items: Iterable[T], workers: int, ahead: int, device: torch.device | str
) -> Generator[Batch, None, None]:
    """Yield batches on a device, in order: threads prefetch `ahead` of them; without `workers`, on demand.

    Copies to the device are asynchronous. Closing the generator ends the threads.
    """
    device = torch.device(device)
    index = torch.accelerator.current_device_index() if device.type != "cpu" else 0

    def prepare() -> None:
        """Select this rank's GPU: pinning opens a context on the thread's current GPU, by default the first."""
        if device.type != "cpu":
            torch.accelerator.set_device_index(index if device.index is None else device.index)

    def pinned(item: T) -> Batch:
        batch = make(item)
        return batch if device.type == "cpu" else {name: value.pin_memory() for name, value in batch.items()}

    def to_device(batch: Batch) -> Batch:
        return {name: value.to(device, non_blocking=True) for name, value in batch.items()}

    if not workers:
        yield from (to_device(pinned(item)) for item in items)
        return
    ready: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="shardwise-data", initializer=prepare) as pool:
        try:
            for item in items:
                ready.append(pool.submit(pinned, item))
                if len(ready) > ahead:
                    yield to_device(ready.popleft().result())
            while ready:
                yield to_device(ready.popleft().result())
        finally:
            for future in ready:
                future.cancel()


_AHEAD = 3


@dataclass(eq=False)
class Evaluation:
    """One pass over the held-out samples, which can be repeated; returned by `open_evaluation`.

    The last batch is padded with rows whose labels are all ignored, so that every rank has the same number of rows and
    no sample counts twice. Without labels, or with floating-point labels, rows cannot be ignored: the last batch is
    smaller, and up to `num_ranks - 1` samples at the end are left out.
    """

    samples: Samples
    """Samples that batches are made of."""
    first: int
    """First held-out sample; all later ones are also held out."""
    share: Share
    workers: int = 1
    """Number of threads; 0: batches are created on demand."""

    def __post_init__(self) -> None:
        self.num_samples = self.samples.num_samples - self.first
        labels = self.samples.batch(torch.tensor([self.first])).get("labels")
        self._has_labels = labels is not None and not labels.is_floating_point()

    def __len__(self) -> int:
        """Number of batches, the same on every rank."""
        whole, rest = divmod(self.num_samples, self.share.batch_size)
        return whole + (rest >= (1 if self._has_labels else self.share.num_ranks))

    def __iter__(self) -> Iterator[Batch]:
        return prefetched(self._make, range(len(self)), self.workers, _AHEAD, self.share.device)

    def _make(self, number: int) -> Batch:
        begin = self.first + number * self.share.batch_size
        num_rows = min(self.share.batch_size, self.samples.num_samples - begin)
        rows = self.share.of(self.share.batch_size if self._has_labels else num_rows)
        filler = rows >= num_rows
        batch = self.samples.batch((rows + begin).masked_fill(filler, begin))
        if bool(filler.any()):
            # Not in place: labels may share memory with the tokens.
            labels = batch["labels"]
            batch["labels"] = labels.masked_fill(filler.view(-1, *[1] * (labels.ndim - 1)), IGNORED)
        return batch


def open_data(
    config: DataConfig,
    *,
    batch_size: int,
    rank: int,
    num_ranks: int,
    seed: int,
    vocab_size: int | None,
    device: torch.device | str,
    progress: Progress | None = None,
) -> Loader:
    """Open the training data.

    Text, JSONL and datasets are tokenized here, once, into a compact array on every rank; token files are memory-mapped
    instead. For more than a few GB of text, use token files.

    Args:
        config: The data.
        batch_size: Rows of a global batch.
        rank: Data-parallel rank of this process.
        num_ranks: Number of data-parallel ranks.
        seed: Seed of the sample order.
        vocab_size: Vocabulary size of the model; None: not checked.
        device: Device of the batches.
        progress: Receives each tokenized file.

    Raises:
        ConfigError: The data is missing, empty, unreadable, too short, or does not fit the model or the ranks.
        EnvironmentProblem: The data needs a library that is not installed.

    Ranks:
        Local. An error about files of one machine is raised on its ranks only: see `raise_on_all_ranks`.
    """
    check_ranges(config, "data")
    samples, tokenizer, identity = open_samples(config, config.source, "data.source", vocab_size, progress)
    check_batch(batch_size, num_ranks)  # after the data: a run reports problems of both
    num_samples = samples.num_samples - _num_held_out(config, samples)
    share = Share(batch_size=batch_size, rank=rank, num_ranks=num_ranks, device=device)
    fingerprint = identity | {"num_samples": num_samples}
    return Loader(
        samples, share, config, num_samples=num_samples, tokenizer=tokenizer, seed=seed, fingerprint=fingerprint
    )


def open_evaluation(
    config: DataConfig, *, vocab_size: int | None, training: Loader | None = None, **share: Any
) -> Evaluation | None:
    """Open the held-out data, if there is any: `data.evaluation`, or the last part of the source.

    Other arguments and errors are as in `open_data`. Pass its loader as `training` to avoid opening the source twice.
    """
    check_ranges(config, "data")
    check_batch(share["batch_size"], share["num_ranks"])
    if config.evaluation is None and config.evaluation_fraction == 0:
        return None
    if config.evaluation is None and training is not None:
        samples = training.samples
    else:
        setting, names = ("source", config.source) if config.evaluation is None else ("evaluation", config.evaluation)
        samples, _, _ = open_samples(config, names, f"data.{setting}", vocab_size)
    first = samples.num_samples - _num_held_out(config, samples) if config.evaluation is None else 0
    held_out = Evaluation(samples, first, Share(**share), workers=min(1, config.workers))
    if not len(held_out):
        raise ConfigError(
            f"{held_out.num_samples} held-out sample(s) cannot be divided among {share['num_ranks']} ranks",
            where="data.evaluation",
            why="without labels batches cannot be padded, and every rank needs a row",
            fix=f"hold out at least {share['num_ranks']} samples",
        )
    return held_out


def _num_held_out(config: DataConfig, samples: Samples) -> int:
    if config.evaluation is not None or config.evaluation_fraction == 0:
        return 0
    num = max(1, round(samples.num_samples * config.evaluation_fraction))
    if num >= samples.num_samples:
        raise ConfigError(
            f"holding out {num} of {samples.num_samples} sample(s) leaves none for training",
            where="data.evaluation_fraction",
            why="at least one full sample is held out",
            fix="use more data or a shorter data.sequence_length, or set data.evaluation",
        )
    return num


def check_batch(batch_size: int, num_ranks: int) -> None:
    """Raise unless every rank gets the same number of sequences, and at least one."""
    if batch_size < 1 or batch_size % num_ranks:
        near = max(batch_size // num_ranks, 1) * num_ranks
        divisors = [n for n in range(1, num_ranks + 1) if batch_size % n == 0] if batch_size > 0 else [1]
        raise ConfigError(
            f"a batch of {batch_size} sequences cannot be divided among {num_ranks} ranks",
            where="training.batch_size",
            why="it is the global batch size, and each rank has the same number of sequences",
            fix=f"set training.batch_size = {near}, or start {divisors[-1]} rank{'s' if divisors[-1] > 1 else ''}",
        )
