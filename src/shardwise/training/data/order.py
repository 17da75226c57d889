"""The order of samples, defined over all ranks together. Any part of any epoch is computed, none is stored."""

from __future__ import annotations

import hashlib
import math

from torch import Tensor

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
