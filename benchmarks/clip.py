"""`clip_grad_norm_` of shardwise against torch's, on as many sharded parameters as a large model has.

python -m benchmarks.clip
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_ as torch_clip

from benchmarks.measuring import Timed, median, median_interval, slowest, time_pairs
from benchmarks.processes import join, on_ranks
from benchmarks.reporting import Result, parse, report
from shardwise.training.step import clip_grad_norm_


@dataclass(frozen=True)
class Setup:
    """How many parameters, of how many numbers each, and how it is measured."""

    device: str
    num_ranks: int
    num_params: int
    num_pairs: int
    num_calls: int


@dataclass(frozen=True)
class Measured:
    """What one rank saw."""

    times: Timed
    norms: tuple[float, float]


def measure(setup: Setup) -> Measured:
    """Clip the same gradients both ways.

    Ranks:
        Collective.
    """
    join(setup.device, setup.num_ranks)
    mesh = init_device_mesh(setup.device, (setup.num_ranks,), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    parameters = []
    for _ in range(setup.num_params):
        parameter = nn.Parameter(distribute_tensor(torch.randn(64, 16, device=setup.device), mesh, [Shard(0)]))
        parameter.grad = parameter.detach().clone()
        parameters.append(parameter)
    # A norm that is never reached: gradients stay the same for every call, the work does not.
    theirs = lambda: torch_clip(parameters, 1e9)  # noqa: E731
    ours = lambda: clip_grad_norm_(parameters, 1e9)  # noqa: E731
    norms = (theirs().full_tensor().item(), ours().item())  # pyrefly: ignore
    repeat = lambda call: [call() for _ in range(setup.num_calls)]  # noqa: E731
    # torch's norm is a DTensor that is not yet reduced; a loop that logs it must gather it.
    times = time_pairs(
        lambda: [norm.full_tensor() for norm in repeat(theirs)],
        lambda: repeat(ours),
        num_pairs=setup.num_pairs,
        device=setup.device,
    )
    dist.destroy_process_group()
    return Measured(times, norms)


def results_of(setup: Setup, by_rank: list[Measured]) -> list[Result]:
    pairs, norms = slowest([one.times.wall for one in by_rank]), by_rank[0].norms
    baseline, value = (median(times) / setup.num_calls * 1e3 for times in (pairs.baseline_s, pairs.candidate_s))
    name = f"clip/{setup.num_params} parameters, {setup.device}, {setup.num_ranks} ranks"
    ratio = median(pairs.ratios)
    return [
        Result(
            case=f"{name}: time against torch",
            value=value,
            unit="ms",
            baseline=baseline,
            ratio=ratio,
            interval=median_interval(pairs.ratios),
            goal="<= 1",
            met=ratio <= 1,
            details={"pairs": setup.num_pairs},
        ),
        Result(
            case=f"{name}: norm against torch",
            value=norms[1],
            unit="",
            baseline=norms[0],
            ratio=norms[1] / norms[0],
            goal="equal within 1e-5",
            met=abs(norms[1] / norms[0] - 1) < 1e-5,
        ),
    ]


def main() -> int:
    options = parse("Clipping against torch's.", toy_help="few parameters: does it run?", add=_add_options)
    setup = Setup(options.device, options.ranks, 1500, 20, 3)
    if options.toy:
        setup = Setup(options.device, options.ranks, 20, 2, 1)
    results = results_of(setup, on_ranks("benchmarks.clip:measure", setup.num_ranks, setup))
    report("clip", results, save=options.save)
    return int(any(result.met is False for result in results if result.goal.startswith("equal")))


def _add_options(parser: Any) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)


if __name__ == "__main__":
    from benchmarks import clip  # under this name the ranks find its classes

    sys.exit(clip.main())
