"""How things are compared: interleaved pairs in one process, an interval for the median, live bytes."""

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

Work = Callable[[], object]

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces each start and stop otherwise


@dataclass(frozen=True)
class Pairs:
    """Seconds of each stretch of the baseline and of the candidate, pair by pair."""

    baseline_s: tuple[float, ...]
    candidate_s: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for theirs, ours in zip(self.baseline_s, self.candidate_s, strict=True)]


@dataclass(frozen=True)
class Timed:
    """The same pairs by two clocks."""

    wall: Pairs
    cpu: Pairs
    """Of all threads of this process: what it worked, without what it waited for or shared cores with."""


def time_pairs(
    baseline: Work,
    candidate: Work,
    *,
    num_pairs: int,
    device: str = "cpu",
    prepare: tuple[Work, Work] = (lambda: None, lambda: None),
) -> Timed:
    """Run both `num_pairs` times in turn, swapping who goes first, so that drift hits both alike.

    Args:
        baseline: What is compared with.
        candidate: What is compared.
        num_pairs: How often each runs.
        device: Where they compute.
        prepare: Called before each run of the baseline, and of the candidate, outside the time.

    Ranks:
        Collective where there is a process group: ranks start each stretch together.
    """
    stretches: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    for pair in range(num_pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            prepare[which]()
            stretches[which].append(_time((baseline, candidate)[which], device))
    wall, cpu = ([tuple(s[clock] for s in stretch) for stretch in stretches] for clock in (0, 1))
    return Timed(Pairs(*wall), Pairs(*cpu))


def _time(work: Work, device: str) -> tuple[float, float]:
    gc.collect()  # neither pays for what the other left behind
    _wait(device)
    start, start_cpu = time.perf_counter(), time.process_time()
    work()
    _wait(device)
    return time.perf_counter() - start, time.process_time() - start_cpu


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake":
        dist.barrier()


def slowest(pairs: Sequence[Pairs]) -> Pairs:
    """One `Pairs` of several ranks: each stretch lasts as long as on its slowest rank."""
    return Pairs(
        tuple(max(times) for times in zip(*(one.baseline_s for one in pairs), strict=True)),
        tuple(max(times) for times in zip(*(one.candidate_s for one in pairs), strict=True)),
    )


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Two of the values that enclose the true median with at least `confidence`, whatever the distribution.

    Order statistics: of n values, the number below the median is binomial(n, 1/2). With fewer than 6 values
    no two of them are that certain, and the extremes are returned.
    """
    ordered, n = sorted(values), len(values)
    tail, outside = 0, 0.0
    while True:
        outside += 2 * math.comb(n, tail) / 2**n
        if outside > 1 - confidence or tail >= n // 2:
            break
        tail += 1
    low = max(tail - 1, 0)
    return ordered[low], ordered[n - 1 - low]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


@dataclass(frozen=True)
class Memory:
    """Bytes of tensors over a stretch of work, counted from its start."""

    kept: int
    """Still alive at the end."""
    peak: int
    """Most alive at one time."""


def watch_memory(work: Work, device: str = "cpu") -> Memory:
    """Run `work` and follow the allocator: every byte of tensor memory, also what no Python object shows."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        gc.collect()
        torch.cuda.synchronize()
        return Memory(torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
        gc.collect()
    # The profiler's own summary adds up operators; the raw events are the allocator's, in order.
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return Memory(live, peak)
