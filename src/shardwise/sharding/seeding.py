"""One stream of random numbers for all ranks, and afterwards each rank's own again."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.sharding.replicas import values_of_ranks


@contextmanager
def same_random_stream(device: torch.device, mesh: DeviceMesh | None) -> Iterator[None]:
    """Draw the same numbers on every rank inside, from a seed that the first draws from its own.

    Every rank draws a seed, so that streams that were in step stay in step, and calling this again gives
    other numbers. Afterwards torch's, Python's and numpy's generators go on from where they were.

    Args:
        device: Whose generator is meant, beside the CPU's.
        mesh: The ranks that take part; None for this one alone.

    Ranks:
        Collective on entry.
    """
    drawn = int(torch.randint(2**62, (), device="cpu"))
    seed = values_of_ranks(drawn, mesh)[0]
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy:
                numpy.random.set_state(numpy_state)
