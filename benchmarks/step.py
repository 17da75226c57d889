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
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.measuring import Memory, Pairs, median, median_interval, slowest, time_pairs, watch_memory
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

    pairs: Pairs
    memory: tuple[Memory, Memory]
    """Of baseline and candidate: building and the first steps."""
    collectives: tuple[list[tuple[str, int, bool]], list[tuple[str, int, bool]]]
    """Kind, bytes and phase of each collective of one step."""
    losses: tuple[float, float]
    """After all pairs; equal to the last bit if both do the same arithmetic."""
    num_groups: int


def measure(setup: Setup) -> Measured:
    """Everything about one case on this rank.

    Ranks:
        Collective.
    """
    join(setup.device, setup.num_ranks, fake=setup.fake)
    mesh = init_device_mesh(setup.device, (dist.get_world_size(),), mesh_dim_names=("shard",))
    model_of = lambda: build(setup.model, setup.size, setup.device)  # noqa: E731
    by_hand = lambda: Trainer(shard_by_hand(model_of(), mesh, setup.device), setup.size, setup.device)  # noqa: E731
    by_us = lambda: Trainer(shard(model_of(), mesh=mesh), setup.size, setup.device)  # noqa: E731
    memory = (_memory(by_hand, setup.device), _memory(by_us, setup.device))
    baseline, candidate = by_hand(), by_us()
    for trainer in (baseline, candidate):
        trainer.steps(2)
    pairs = time_pairs(
        lambda: baseline.steps(setup.num_steps),
        lambda: candidate.steps(setup.num_steps),
        num_pairs=setup.num_pairs,
        device=setup.device,
    )
    traces = (_collectives(baseline), _collectives(candidate))
    losses = (baseline.loss.item(), candidate.loss.item())
    num_groups = sum(
        1 for module in baseline.model.modules() if hasattr(module, "set_reshard_after_backward")
    )
    dist.destroy_process_group()
    return Measured(pairs, memory, traces, losses, num_groups)


def _memory(make: Callable[[], Trainer], device: str) -> Memory:
    """Memory of a trainer by itself: what lives between steps, and the peak within them."""
    kept: list[Trainer] = []
    warm = watch_memory(lambda: (kept.append(make()), kept[0].steps(2)), device)  # optimizer state exists now
    stepping = watch_memory(lambda: kept[0].steps(2), device)
    kept.clear()
    return Memory(warm.kept, warm.kept + stepping.peak)


def _collectives(trainer: Trainer) -> list[tuple[str, int, bool]]:
    with count_collectives(trainer.model) as trace:
        trainer.steps(1)
    return trace.shape()


def results_of(setup: Setup, by_rank: list[Measured]) -> list[Result]:
    """The case's rows; the first rank speaks where ranks agree."""
    name = f"step/{setup.model}/{setup.device}/{setup.num_ranks} ranks" + (" (fake)" if setup.fake else "")
    first, pairs = by_rank[0], slowest([one.pairs for one in by_rank])
    ratio, interval = median(pairs.ratios), median_interval(pairs.ratios)
    baseline_s, ours_s = (median(times) / setup.num_steps for times in (pairs.baseline_s, pairs.candidate_s))
    paired = [a - b for a, b in zip(pairs.candidate_s, pairs.baseline_s, strict=True)]
    extra_us = median(paired) / setup.num_steps * 1e6
    details = {
        "pairs": setup.num_pairs,
        "steps_per_stretch": setup.num_steps,
        "groups": first.num_groups,
        "extra_us_per_group_and_step": round(extra_us / first.num_groups, 1),
    }
    memory = [max(one.memory[which].peak for one in by_rank) for which in (0, 1)]
    rows = [
        Result(
            case=f"{name}: time against by hand",
            value=ours_s * 1e3,
            unit="ms",
            baseline=baseline_s * 1e3,
            ratio=ratio,
            interval=interval,
            goal=f"<= {TIME_GOAL}",
            met=ratio <= TIME_GOAL,
            details=details,
        ),
        Result(
            case=f"{name}: peak memory against by hand",
            value=memory[1],
            unit="B",
            baseline=memory[0],
            ratio=memory[1] / memory[0],
            goal=f"<= {MEMORY_GOAL}",
            met=memory[1] <= MEMORY_GOAL * memory[0],
        ),
    ]
    theirs, ours = first.collectives
    for unit, count in (("collectives", len), ("B", lambda trace: sum(each[1] for each in trace))):
        what = "collectives a step" if unit != "B" else "bytes communicated a step"
        rows.append(
            Result(
                case=f"{name}: {what}",
                value=count(ours),
                unit=unit,
                baseline=count(theirs),
                ratio=count(ours) / max(count(theirs), 1),
                goal="equal",
                met=ours == theirs,
            )
        )
    rows.append(
        Result(
            case=f"{name}: last loss",
            value=first.losses[1],
            unit="",
            baseline=first.losses[0],
            goal="equal",
            met=first.losses[0] == first.losses[1],
        )
    )
    return rows


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
        setup = Setup(
            model,
            size,
            options.device,
            options.fake or options.ranks,
            bool(options.fake),
            num_pairs,
            num_steps,
        )
        results += results_of(
            setup, on_ranks("benchmarks.step:measure", setup.num_ranks, setup, fake=setup.fake)
        )
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
