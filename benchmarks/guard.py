"""A training step with `guard` against the same step without it, and what the guard adds on the training thread.

python -m benchmarks.guard                             2 gloo ranks on this machine's CPU
python -m benchmarks.guard --device cuda --fake 8      rank 0 of 8 on one GPU: every collective is written down

Both steps are of one model, whose guard is opened and closed in between: two models differ by where their memory lies.
A step is noisier than what the guard adds, so that is also measured alone: the step's events replayed through the
guard's wrappers, around collectives that do nothing. `shard` compares the order of collectives likewise: of a step
of 200 ms it takes these events, and the exchange of the step's digest over the store as if each rank were a machine.
"""

import sys
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.guard_replay import last_events, replay
from benchmarks.measuring import Timed, median, median_interval, slowest, time_pairs
from benchmarks.processes import join, on_ranks
from benchmarks.reporting import Result, parse, report
from benchmarks.trainers import Trainer, build
from shardwise import compat
from shardwise.diagnosing.guard import Guard, guard
from shardwise.distributed.collective_trace import StepAgreement
from shardwise.sharding.apply import shard

GOAL = 1.01
STEP_S = 0.2
_NUM_EXCHANGES = 200


@dataclass(frozen=True)
class Setup:
    """How it is measured."""

    size: str
    device: str
    num_ranks: int
    fake: bool
    num_pairs: int
    num_steps: int


@dataclass(frozen=True)
class Measured:
    """What one rank saw."""

    times: Timed
    num_events: int
    """Of one step."""
    added_s: float
    """Seconds a step on the training thread, by replaying its events."""
    exchange_s: float
    """Seconds a step in which machines compare what led to it; 0 without other ranks."""


class Switch:
    """Opens and closes the guard of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.guard: Guard | None = None

    def off(self) -> None:
        if self.guard is not None:
            self.guard.close()
        self.guard = None

    def on(self) -> Guard:
        self.guard = guard(self.model)
        return self.guard


def measure(setup: Setup) -> Measured:
    """Times on this rank, and events a step.

    Ranks:
        Collective.
    """
    join(setup.device, setup.num_ranks, fake=setup.fake)
    mesh = init_device_mesh(setup.device, (setup.num_ranks,), mesh_dim_names=("shard",))
    trainer = Trainer(shard(build("llama", setup.size, setup.device), mesh=mesh), setup.size, setup.device)
    switch = Switch(trainer.model)
    slot = switch.on().tracers[0].trace
    trainer.steps(2)
    before = slot.count
    trainer.steps(1)
    events = last_events(slot, slot.count - before)

    def work() -> None:
        trainer.steps(setup.num_steps)

    times = time_pairs(
        work,
        work,
        num_pairs=setup.num_pairs,
        device=setup.device,
        prepare=(switch.off, lambda: (switch.off(), switch.on())),
    )
    switch.off()
    exchange_s = 0.0 if setup.fake else _exchange_s()
    dist.destroy_process_group()
    return Measured(times, len(events), replay(events, setup.num_ranks, setup.device), exchange_s)


def _exchange_s() -> float:
    agreement = StepAgreement(compat.store_connector("benchmark")(), dist.get_rank(), dist.get_world_size())
    times = []
    for step in range(_NUM_EXCHANGES):
        dist.barrier()
        start = time.perf_counter()
        assert agreement.is_shared(f"digest {step}", lambda: None)
        times.append(time.perf_counter() - start)
    return median(times)


def main() -> int:
    options = parse("A step with guard against one without.", toy_help="tiny model, two pairs", add=_add_options)
    size = "toy" if options.toy else options.device
    num_ranks, fake = options.fake or options.ranks, bool(options.fake)
    pairs, steps = (2, 1) if options.toy else (options.pairs, options.steps)
    setup = Setup(size, options.device, num_ranks, fake, pairs, steps)
    by_rank = on_ranks("benchmarks.guard:measure", num_ranks, setup, fake=fake)
    name = f"guard/llama/{setup.device}/{num_ranks} ranks" + (" (fake)" if fake else "")
    report(
        "guard",
        [_whole(name, by_rank, steps), _alone(name, by_rank, steps), _of_a_step(name, by_rank)],
        save=options.save,
    )
    return int(by_rank[0].num_events == 0)


def _whole(name: str, by_rank: list[Measured], steps: int) -> Result:
    wall = slowest([measured.times.wall for measured in by_rank])
    ratio = median(wall.ratios)
    cpu = by_rank[0].times.cpu
    return Result(
        case=f"{name}: time against no guard",
        value=median(wall.candidate_s) / steps * 1e3,
        unit="ms",
        baseline=median(wall.baseline_s) / steps * 1e3,
        ratio=ratio,
        interval=median_interval(wall.ratios),
        goal=f"<= {GOAL}",
        met=ratio <= GOAL,
        details={"events_a_step": by_rank[0].num_events, "cpu_time_ratio": round(median(cpu.ratios), 4)},
    )


def _alone(name: str, by_rank: list[Measured], steps: int) -> Result:
    wall = slowest([measured.times.wall for measured in by_rank])
    step_s = median(wall.baseline_s) / steps
    added_s = max(measured.added_s for measured in by_rank)
    num_events = max(by_rank[0].num_events, 1)
    return Result(
        case=f"{name}: a step and what the guard adds on its thread",
        value=(step_s + added_s) * 1e3,
        unit="ms",
        baseline=step_s * 1e3,
        ratio=1 + added_s / step_s,
        goal=f"<= {GOAL}",
        met=1 + added_s / step_s <= GOAL,
        details={"added_us_a_step": round(added_s * 1e6, 1), "us_per_event": round(added_s / num_events * 1e6, 2)},
    )


def _of_a_step(name: str, by_rank: list[Measured]) -> Result:
    added_s, exchange_s = (max(getattr(m, part) for m in by_rank) for part in ("added_s", "exchange_s"))
    ratio = 1 + (added_s + exchange_s) / STEP_S
    return Result(
        case=f"{name}: the order check and its exchange in a step of {STEP_S * 1e3:.0f} ms",
        value=(added_s + exchange_s + STEP_S) * 1e3,
        unit="ms",
        baseline=STEP_S * 1e3,
        ratio=ratio,
        goal=f"<= {GOAL}",
        met=ratio <= GOAL,
        details={
            "events_a_step": by_rank[0].num_events,
            "us_per_event": round(added_s / max(by_rank[0].num_events, 1) * 1e6, 2),
            "exchange_us": round(exchange_s * 1e6, 1),
        },
    )


def _add_options(parser: Any) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--fake", type=int, default=0, metavar="N", help="be rank 0 of N without the others")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="steps in each half of a pair")


if __name__ == "__main__":
    from benchmarks import guard as benchmark  # under this name the ranks find its classes

    sys.exit(benchmark.main())
