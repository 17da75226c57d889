"""What planning costs: time for large models, memory of one rank of a thousand, start of the command.

python -m benchmarks.planning
"""

import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.measuring import median, median_interval, time_pairs, watch_memory
from benchmarks.mixtral import Mixtral
from benchmarks.processes import join
from benchmarks.reporting import Result, parse, report
from benchmarks.trainers import shard_by_hand
from shardwise.config.schema import MeshConfig, ShardConfig
from shardwise.models.load import load_model
from shardwise.planning.plan import Group, Plan
from shardwise.planning.planner import plan
from shardwise.sharding.apply import shard
from shardwise.sharding.materialize import materialize

GIB = 2**30
PLAN_GOALS_S = {"llama3-debug": 5.0, "llama3-70b": 5.0, "llama3-405b": 15.0}
HELP_GOAL_S = 0.5
NUM_RANKS, NUM_MIXTRAL_RANKS = 1024, 64


def time_plan(name: str) -> list[Result]:
    """The first plan of this process: source is read and parsed in it."""
    model = load_model(name)
    start = time.perf_counter()
    made = plan(model, mesh=MeshConfig(shard=NUM_RANKS, device="cpu"))
    seconds, goal = time.perf_counter() - start, PLAN_GOALS_S[name]
    details = {"groups": len(made.groups), "ranks": NUM_RANKS}
    return [
        Result(
            case=f"planning/plan {name} on meta",
            value=seconds,
            unit="s",
            goal=f"<= {goal:g} s",
            met=seconds <= goal,
            details=details,
        )
    ]


def time_shard(name: str) -> list[Result]:
    """Plan and shard as rank 0 of 1,024, against `fully_shard` by hand on the same model and mesh."""
    join("cpu", NUM_RANKS, fake=True)
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("shard",))
    models = [load_model(name) for _ in range(6)]
    pairs = time_pairs(
        lambda: shard_by_hand(models.pop(), mesh, "cpu"), lambda: shard(models.pop(), mesh=mesh), num_pairs=3
    ).wall
    dist.destroy_process_group()
    return [
        Result(
            case=f"planning/rank 0 of {NUM_RANKS}, {name}: plan + shard against by hand",
            value=median(pairs.candidate_s),
            unit="s",
            baseline=median(pairs.baseline_s),
            ratio=median(pairs.ratios),
            details={"pairs": 3},
        )
    ]


def watch_shard(name: str) -> list[Result]:
    """Tensor memory of plan and shard on meta as rank 0 of 1,024: none, before `materialize`."""
    join("cpu", NUM_RANKS, fake=True)
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("shard",))
    model = load_model(name)
    resident = psutil.Process().memory_info().rss
    memory = watch_memory(lambda: shard(model, mesh=mesh))
    resident = psutil.Process().memory_info().rss - resident
    dist.destroy_process_group()
    return [
        Result(
            case=f"planning/rank 0 of {NUM_RANKS}, {name}: tensor bytes kept by plan + shard on meta",
            value=memory.kept,
            unit="B",
            goal="0 B",
            met=memory.kept == 0,
            details={"peak_bytes": memory.peak, "rss_growth_bytes_with_profiler": resident},
        ),
    ]


def materialize_one(name: str) -> list[Result]:
    """Materialise rank 0 of 1,024: its shards and buffers, and at most one module in full beside them."""
    join("cpu", NUM_RANKS, fake=True)
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("shard",))
    model = load_model(name)
    largest = max(_own_bytes(module) for module in model.modules())
    shard(model, mesh=mesh)
    filling = watch_memory(lambda: materialize(model))
    needed = sum(_padded_bytes(p) for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    dist.destroy_process_group()
    where = f"planning/rank 0 of {NUM_RANKS}, {name}"
    return [
        Result(
            case=f"{where}: tensor bytes kept by materialize",
            value=filling.kept,
            unit="B",
            baseline=needed,
            ratio=filling.kept / needed,
            goal="<= 1.01",
            met=filling.kept <= 1.01 * needed,
        ),
        Result(
            case=f"{where}: peak of materialize against shard + largest module",
            value=filling.peak,
            unit="B",
            baseline=needed + largest,
            ratio=filling.peak / (needed + largest),
        ),
    ]


def _own_bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters(recurse=False))


def _padded_bytes(parameter: nn.Parameter) -> int:
    """Storage of this rank's shard, padding included."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local().untyped_storage().nbytes()


def fused_experts(num_layers: int) -> list[Result]:
    """Mixtral 8x7B on 64 ranks: eight experts in one tensor cannot be split 64 ways on dim 0."""
    with torch.device("meta"):
        model = Mixtral(num_layers)
    mesh = MeshConfig(shard=NUM_MIXTRAL_RANKS, device="cpu")
    chosen = plan(model, mesh=mesh)
    first = plan(model, ShardConfig(shard_dim="first"), mesh=mesh)
    ours, theirs = _training_gib(chosen), _training_gib(first)
    stored, stored_first = chosen.bytes_per_rank / GIB, first.bytes_per_rank / GIB
    where = f"planning/Mixtral 8x7B ({num_layers} layers) on {NUM_MIXTRAL_RANKS} ranks"
    return [
        Result(
            case=f"{where}: parameters of a rank, against dim 0",
            value=stored,
            unit="GiB",
            baseline=stored_first,
            ratio=stored / stored_first,
        ),
        Result(
            case=f"{where}: states and buffers of a rank, against dim 0",
            value=ours,
            unit="GiB",
            baseline=theirs,
            ratio=ours / theirs,
            goal="< 1",
            met=ours < theirs,
            details={"counted": "float32 parameters, gradients, two Adam moments, gather and reduce buffers"},
        ),
    ]


def _training_gib(made: Plan) -> float:
    """States of the fullest rank, and the padded buffers that gather and reduce the largest group."""
    num_shards = made.num_shards

    def padded(group: Group) -> int:
        return group.bytes_per_rank(num_shards) * num_shards

    return (4 * made.bytes_per_rank + 2 * max(padded(group) for group in made.groups)) / GIB


def time_help(num_runs: int) -> list[Result]:
    """`shardwise --help` as a user types it, against a bare Python."""
    command = [str(Path(sysconfig.get_path("scripts")) / "shardwise"), "--help"]
    if not Path(command[0]).exists():
        return []  # a copy of the tree that is not installed
    runs = [(_seconds(command), _seconds([sys.executable, "-c", "pass"])) for _ in range(num_runs)]
    seconds = [run[0] for run in runs]
    value = median(seconds)
    return [
        Result(
            case="planning/shardwise --help, against python -c pass",
            value=value,
            unit="s",
            baseline=median([run[1] for run in runs]),
            interval=median_interval(seconds),
            goal=f"<= {HELP_GOAL_S} s",
            met=value <= HELP_GOAL_S,
            details={"runs": num_runs, "interval_of": "value"},
        )
    ]


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


CASES: dict[str, Callable[[Any], list[Result]]] = {
    "plan": time_plan,
    "time shard": time_shard,
    "watch shard": watch_shard,
    "materialize": materialize_one,
}


def in_new_process(case: str, model: str) -> list[Result]:
    """Run one case by itself: nothing is cached, and no other case's memory is counted."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(run_case, case, model).result()


def run_case(case: str, model: str) -> list[Result]:
    return CASES[case](model)


def main() -> int:
    options = parse("What planning costs.", toy_help="the debug model only, all in one process: does it run?")
    run = run_case if options.toy else in_new_process
    results: list[Result] = []
    for name in ["llama3-debug"] if options.toy else ["llama3-70b", "llama3-405b"]:
        results += run("plan", name)
    for case in ("time shard", "watch shard"):
        results += run(case, "llama3-debug" if options.toy else "llama3-70b")
    results += run("materialize", "llama3-debug" if options.toy else "llama3-1b")
    results += fused_experts(2 if options.toy else 32)
    results += time_help(2 if options.toy else 20)
    report("planning", results, save=options.save)
    return 0


if __name__ == "__main__":
    from benchmarks import planning  # under this name new processes find its classes

    sys.exit(planning.main())
