"""The same run again: seeds for each rank, step and purpose, and kernels that give the same bits every time."""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def seed_for(seed: int, *purpose: object) -> int:
    """A seed below 2**63 for one purpose, as in `seed_for(0, "dropout", rank, step)`; others have nothing in common.

    Ranks:
        Local: ranks that name the same purpose get the same seed.
    """
    text = repr((int(seed), *purpose)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def seed_step(seed: int, rank: int, step: int) -> None:
    """Seed torch's, Python's and NumPy's random numbers for one step on one rank.

    What a step draws (dropout, mostly) depends on the run's seed, the rank and the step alone: a resumed run draws the
    same, from whatever format it was loaded.

    Args:
        seed: The run's.
        rank: Among data-parallel ranks; those that share a layer's matrices must drop the same.
        step: From 0.

    Ranks:
        Local.
    """
    number = seed_for(seed, "step", rank, step)
    torch.default_generator.manual_seed(number)  # torch.manual_seed asks for every kind of device, each time
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)
    elif torch.accelerator.is_available():
        torch.manual_seed(number)
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number % 2**32)


@contextmanager
def same_bits(wanted: bool) -> Iterator[None]:
    """Allow only kernels that give the same bits every time, until the block ends.

    Args:
        wanted: False changes nothing.

    Ranks:
        Local.
    """
    if not wanted:
        yield
        return
    had, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    # CUDA's matrix products need a workspace of fixed size; it must not have made any yet.
    sets_workspace = torch.cuda.is_available() and _WORKSPACE not in os.environ
    if sets_workspace:
        os.environ[_WORKSPACE] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(had, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        if sets_workspace:
            os.environ.pop(_WORKSPACE, None)
