"""Ranks for benchmarks: real ones on this machine, or this process as one of many that do not exist."""

from typing import Any

import torch
import torch.distributed as dist

from shardwise.distributed.local_ranks import start_local
from shardwise.models.load import find_callable


def on_ranks(target: str, num_ranks: int, *args: Any, fake: bool = False) -> list[Any]:
    """What `module:function` returned on each rank, in order; only rank 0's where the others are fake."""
    if fake:
        return [find_callable(target)(*args)]
    return start_local(target, num_ranks, args)


def join(device: str, num_ranks: int, *, fake: bool = False) -> None:
    """Join the process group of this benchmark.

    Ranks:
        Collective, unless fake.
    """
    if fake:
        # torch has no public name for the store of a group whose other ranks do not exist.
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
        return
    if device == "cuda":
        torch.cuda.set_device(0)
    # NCCL refuses two ranks on one GPU.
    dist.init_process_group("nccl" if device == "cuda" and num_ranks == 1 else "gloo")
