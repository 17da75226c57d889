"""A real test of the collectives between local ranks: are the results right, and how fast are they?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwise import compat
from shardwise.config.schema import MeshConfig
from shardwise.errors import EnvironmentProblem
from shardwise.sharding.mesh import init_distributed, shutdown

_REPEATS = 5
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One collective of one size."""

    collective: str
    num_bytes: int
    """Of the whole result."""
    seconds: float
    """Median of a few."""

    @property
    def bytes_per_second(self) -> float:
        """Of the whole result; what a model of that size would see."""
        return self.num_bytes / self.seconds


def measure_collectives(sizes: tuple[int, ...] = SIZES) -> list[Measured]:
    """Run each collective that FSDP2 uses at several sizes, and check what it returns.

    Raises:
        EnvironmentProblem: A collective returned a wrong result.

    Ranks:
        Collective: the function for `start_local`.
    """
    mesh = init_distributed(MeshConfig())
    device, num_ranks, rank = mesh.device_type, mesh.size(), mesh.get_rank()
    rows = [row for size in sizes for row in _measure(max(size // 4 // num_ranks, 1), rank, num_ranks, device)]
    shutdown()
    return rows


def _measure(count: int, rank: int, num_ranks: int, device: str) -> list[Measured]:
    """Each collective with parts of `count` elements."""
    world = dist.group.WORLD
    assert world is not None
    part = torch.full((count,), float(rank + 1), device=device)
    whole = torch.empty(count * num_ranks, device=device)
    rows = [_time("all-gather", whole, lambda: compat.all_gather_flat(whole, part, world))]
    _expect("all-gather", whole.view(num_ranks, count)[:, 0], torch.arange(1.0, num_ranks + 1, device=device))
    sent = torch.full((count * num_ranks,), float(rank + 1), device=device)
    rows.append(_time("reduce-scatter", sent, lambda: compat.reduce_scatter_flat(part, sent, world)))
    _expect("reduce-scatter", part[:1], torch.tensor([num_ranks * (num_ranks + 1) / 2], device=device))
    rows.append(_time("all-reduce", whole, lambda: dist.all_reduce(whole.fill_(1.0))))
    _expect("all-reduce", whole[:1], torch.tensor([float(num_ranks)], device=device))
    return rows


def _time(name: str, whole: torch.Tensor, run: Callable[[], object]) -> Measured:
    seconds = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        run()
        if whole.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    usual = sorted(seconds[1:])[_REPEATS // 2]
    return Measured(collective=name, num_bytes=whole.numel() * whole.element_size(), seconds=usual)


def _expect(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    if not torch.equal(got, wanted):
        raise EnvironmentProblem(
            f"{name} returned {got.tolist()[:8]} where {wanted.tolist()[:8]} is right",
            where=f"{dist.get_backend()} on {got.device.type}",
            why="the communication library, the driver or the network mixes up data",
            fix="update them; with NCCL try NCCL_P2P_DISABLE=1 to find the culprit",
        )
