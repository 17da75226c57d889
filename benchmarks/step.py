"""A training step sharded by shardwise against the same model sharded by hand with torch's `fully_shard`.

python -m benchmarks.step                              2 gloo ranks on this machine's CPU
python -m benchmarks.step --device cuda --ranks 1      one GPU, NCCL
python -m benchmarks.step --device cuda --fake 8       rank 0 of 8: real memory, no communication
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from benchmarks.measuring import Pairs, Timed, median, median_interval, slowest, time_pairs, watch_memory
from benchmarks.processes import join, on_ranks
from benchmarks.reporting import Result, parse, report
from benchmarks.trainers import Trainer, build, shard_by_hand
from shardwise.sharding.apply import shard
from tests.collectives import count_collectives

TIME_GOAL = MEMORY_GOAL = 1.02


@dataclass(frozen=True)
class Setup:
    """One case: which model, how large, and how it is measured."""

    model: str
    size: str
    device: str
    num_ranks: int
    fake: bool
    num_pairs: int
    num_steps: int
    """Steps in one stretch of a pair."""


@dataclass(frozen=True)
class Measured:
    """What one rank saw."""

    times: Timed
    collectives: tuple[list[tuple[str, int, bool]], list[tuple[str, int, bool]]]
    """Kind, bytes and phase of each collective of one step."""
    losses: tuple[float, float]
    """After all pairs; equal to the last bit if both do the same arithmetic."""
    num_groups: int


def measure(setup: Setup) -> Measured:
    """Time and collectives of one case on this rank.

    Ranks:
        Collective.
    """
    join(setup.device, setup.num_ranks, fake=setup.fake)
    baseline, candidate = (make() for make in _trainers(setup))
    for trainer in (baseline, candidate):
        trainer.steps(2)
    times = time_pairs(
        lambda: baseline.steps(setup.num_steps),
        lambda: candidate.steps(setup.num_steps),
        num_pairs=setup.num_pairs,
        device=setup.device,
    )
    traces = (_collectives(baseline), _collectives(candidate))
    losses = (baseline.loss.item(), candidate.loss.item())
    num_groups = sum(isinstance(module, FSDPModule) for module in baseline.model.modules())
    dist.destroy_process_group()
    return Measured(times, traces, losses, num_groups)


def peak_bytes(setup: Setup) -> tuple[int, int]:
    """Peak memory of baseline and candidate, each by itself, on rank 0.

    Always without the other ranks, where every byte is repeatable: gloo's threads free a buffer when they get
    to it, so that with real ranks the same step peaks up to a tenth higher or lower.
    """
    join(setup.device, setup.num_ranks, fake=True)
    theirs, ours = (_peak(make, setup.device) for make in _trainers(setup))
    dist.destroy_process_group()
    return theirs, ours


def _peak(make: Callable[[], Trainer], device: str) -> int:
    """What lives between steps, and the most that is added within them."""
    made: list[Trainer] = []
    warm = watch_memory(lambda: (made.append(make()), made[0].steps(2)), device)  # optimizer state exists now
    return warm.kept + watch_memory(lambda: made[0].steps(2), device).peak


def _trainers(setup: Setup) -> tuple[Callable[[], Trainer], Callable[[], Trainer]]:
    """What builds the baseline and the candidate."""
    mesh = init_device_mesh(setup.device, (setup.num_ranks,), mesh_dim_names=("shard",))
    size, device = setup.size, setup.device

    def make(shard_model: Callable[[nn.Module], nn.Module]) -> Trainer:
        return Trainer(shard_model(build(setup.model, size, device)), size, device)

    return (
        lambda: make(lambda model: shard_by_hand(model, mesh, device)),
        lambda: make(lambda model: shard(model, mesh=mesh)),
    )


def _collectives(trainer: Trainer) -> list[tuple[str, int, bool]]:
    with count_collectives(trainer.model) as trace:
        trainer.steps(1)
    return trace.shape()


def results_of(setup: Setup, by_rank: list[Measured], peaks: tuple[int, int]) -> list[Result]:
    """The case's rows; the first rank speaks where ranks agree."""
    name = f"step/{setup.model}/{setup.device}/{setup.num_ranks} ranks" + (" (fake)" if setup.fake else "")
    theirs, ours = by_rank[0].collectives
    num_groups = by_rank[0].num_groups
    their_loss, our_loss = by_rank[0].losses
    their_peak, our_peak = peaks
    their_bytes, our_bytes = (sum(each[1] for each in trace) for trace in (theirs, ours))
    return [
        _time_row(f"{name}: time against by hand", setup, [one.times.wall for one in by_rank], num_groups),
        _time_row(f"{name}: CPU time against by hand", setup, [one.times.cpu for one in by_rank], num_groups),
        Result(
            case=f"{name}: peak memory against by hand",
            value=our_peak,
            unit="B",
            baseline=their_peak,
            ratio=our_peak / their_peak,
            goal=f"<= {MEMORY_GOAL}",
            met=our_peak <= MEMORY_GOAL * their_peak,
        ),
        _equal_row(f"{name}: collectives a step", len(ours), len(theirs), "", ours == theirs),
        _equal_row(f"{name}: bytes communicated a step", our_bytes, their_bytes, "B", ours == theirs),
        _equal_row(f"{name}: last loss", our_loss, their_loss, "", our_loss == their_loss),
    ]


def _time_row(case: str, setup: Setup, by_rank: list[Pairs], num_groups: int) -> Result:
    pairs = slowest(by_rank)
    ratio = median(pairs.ratios)
    baseline_s, value_s = (median(times) / setup.num_steps for times in (pairs.baseline_s, pairs.candidate_s))
    extra_s = median([a - b for a, b in zip(pairs.candidate_s, pairs.baseline_s, strict=True)])
    return Result(
        case=case,
        value=value_s * 1e3,
        unit="ms",
        baseline=baseline_s * 1e3,
        ratio=ratio,
        interval=median_interval(pairs.ratios),
        goal=f"<= {TIME_GOAL}",
        met=ratio <= TIME_GOAL,
        details={
            "pairs": setup.num_pairs,
            "steps_per_stretch": setup.num_steps,
            "groups": num_groups,
            "extra_us_per_group_and_step": round(extra_s / setup.num_steps / num_groups * 1e6, 1),
        },
    )


def _equal_row(case: str, value: float, baseline: float, unit: str, is_equal: bool) -> Result:
    """Both sides did the very same; of collectives that means kind, bytes and order of every one of them."""
    return Result(case=case, value=value, unit=unit, baseline=baseline, goal="equal", met=is_equal)


def main() -> int:
    options = parse(
        "A training step of shardwise against hand-written FSDP2.",
        toy_help="tiny models, two pairs: does it run?",
        add=_add_options,
    )
    size = "toy" if options.toy else options.device
    num_pairs, num_steps = (2, 1) if options.toy else (options.pairs, options.steps)
    results: list[Result] = []
    for model in options.models:
        num_ranks, fake = options.fake or options.ranks, bool(options.fake)
        setup = Setup(model, size, options.device, num_ranks, fake, num_pairs, num_steps)
        by_rank = on_ranks("benchmarks.step:measure", num_ranks, setup, fake=fake)
        results += results_of(setup, by_rank, peak_bytes(setup))
    report("step", results, save=options.save)
    # Times depend on the machine; what is counted does not.
    return int(any(result.met is False for result in results if result.goal == "equal"))


def _add_options(parser: Any) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="several ranks on one GPU talk over gloo")
    parser.add_argument("--fake", type=int, default=0, metavar="N", help="be rank 0 of N without the others")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="steps in each half of a pair")
    parser.add_argument("--models", nargs="+", choices=("llama", "tutorial"), default=["llama", "tutorial"])


if __name__ == "__main__":
    from benchmarks import step  # under this name the ranks find its classes

    sys.exit(step.main())
