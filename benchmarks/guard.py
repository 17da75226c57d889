"""A training step with `guard` against the same step without it.

python -m benchmarks.guard                             2 gloo ranks on this machine's CPU
python -m benchmarks.guard --device cuda --fake 8      rank 0 of 8 on one GPU: every collective is written down
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.measuring import Timed, median, median_interval, slowest, time_pairs
from benchmarks.processes import join, on_ranks
from benchmarks.reporting import Result, parse, report
from benchmarks.trainers import Trainer, build
from shardwise.diagnosing.guard import guard
from shardwise.sharding.apply import shard

GOAL = 1.01


@dataclass(frozen=True)
class Setup:
    """How it is measured."""

    size: str
    device: str
    num_ranks: int
    fake: bool
    num_pairs: int
    num_steps: int


def measure(setup: Setup) -> tuple[Timed, int]:
    """Times on this rank, and events a step.

    Ranks:
        Collective.
    """
    join(setup.device, setup.num_ranks, fake=setup.fake)
    mesh = init_device_mesh(setup.device, (setup.num_ranks,), mesh_dim_names=("shard",))
    plain, guarded = (
        Trainer(shard(build("llama", setup.size, setup.device), mesh=mesh), setup.size, setup.device) for _ in range(2)
    )
    with guard(guarded.model) as watching:
        for trainer in (plain, guarded):
            trainer.steps(2)
        before = watching.witness.slot.count
        guarded.steps(1)
        num_events = watching.witness.slot.count - before
        plain.steps(1)
        times = time_pairs(
            lambda: plain.steps(setup.num_steps),
            lambda: guarded.steps(setup.num_steps),
            num_pairs=setup.num_pairs,
            device=setup.device,
        )
    dist.destroy_process_group()
    return times, num_events


def main() -> int:
    options = parse("A step with guard against one without.", toy_help="tiny model, two pairs", add=_add_options)
    size = "toy" if options.toy else options.device
    num_ranks, fake = options.fake or options.ranks, bool(options.fake)
    pairs, steps = (2, 1) if options.toy else (options.pairs, options.steps)
    setup = Setup(size, options.device, num_ranks, fake, pairs, steps)
    by_rank = on_ranks("benchmarks.guard:measure", num_ranks, setup, fake=fake)
    name = f"guard/llama/{setup.device}/{num_ranks} ranks" + (" (fake)" if fake else "")
    wall = slowest([times.wall for times, _ in by_rank])
    ratio = median(wall.ratios)
    extra_s = median([a - b for a, b in zip(wall.candidate_s, wall.baseline_s, strict=True)]) / steps
    num_events = by_rank[0][1]
    result = Result(
        case=f"{name}: time against no guard",
        value=median(wall.candidate_s) / steps * 1e3,
        unit="ms",
        baseline=median(wall.baseline_s) / steps * 1e3,
        ratio=ratio,
        interval=median_interval(wall.ratios),
        goal=f"<= {GOAL}",
        met=ratio <= GOAL,
        details={"events_a_step": num_events, "extra_us_per_event": round(extra_s / max(num_events, 1) * 1e6, 1)},
    )
    report("guard", [result], save=options.save)
    return int(num_events == 0)


def _add_options(parser: Any) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--fake", type=int, default=0, metavar="N", help="be rank 0 of N without the others")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="steps in each half of a pair")


if __name__ == "__main__":
    from benchmarks import guard as benchmark  # under this name the ranks find its classes

    sys.exit(benchmark.main())
