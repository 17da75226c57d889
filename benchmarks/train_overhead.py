"""What `shardwise train` costs beside a bare hand-written loop: a step, the first step, waiting for data, a long run.

python -m benchmarks.train_overhead                    2 gloo ranks on this machine's CPU, the embedded default's model
python -m benchmarks.train_overhead --device cuda      llama3-1b in bfloat16 on one GPU, beside hand-written FSDP2
python -m benchmarks.train_overhead --soak 100000      so many steps of a tiny model: does a step's cost grow?
"""

import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.hand_written import HandWritten, by_hand, copy_weights
from benchmarks.measuring import Pairs, Timed, median, median_interval, slowest, time_pairs
from benchmarks.processes import on_ranks
from benchmarks.reporting import Result, parse, report
from benchmarks.soak import soak_results
from shardwise.config.run import CheckpointConfig, DataConfig, OptimizerConfig, RunConfig, TrainingConfig
from shardwise.config.schema import MeshConfig
from shardwise.diagnosing.guard import explained, guard
from shardwise.distributed.mesh import init_distributed, shutdown
from shardwise.distributed.stop_requests import StopRequest
from shardwise.models.load import load_model
from shardwise.progress import NoProgress
from shardwise.sharding.apply import shard
from shardwise.sharding.materialize import materialize
from shardwise.training.loop import gc_frozen, train
from shardwise.training.metrics import flops_per_token, mfu, peak_flops
from shardwise.training.run import TrainingRun, open_run
from shardwise.training.step import mean_over_ranks

STEP_GOAL, FIRST_GOAL, SPEED_GOAL, WAIT_GOAL = 1.02, 1.2, 0.98, 0.05
SAME_LOSS = "within 0.001"
_TINY = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2}


@dataclass(frozen=True)
class Setup:
    """What is trained, and how it is measured."""

    model: str
    options: dict[str, Any]
    device: str
    num_ranks: int
    batch_size: int
    length: int
    num_pairs: int
    num_steps: int
    """Steps in one stretch of a pair."""
    num_starts: int
    """Pairs of first steps."""

    @property
    def tokens(self) -> int:
        return self.batch_size * self.length


@dataclass(frozen=True)
class Measured:
    """What one rank saw."""

    steps: Timed
    starts: Timed | None
    waits: dict[int, float]
    """Share of a step that waits for data, by the number of workers."""
    losses: tuple[float, float]
    """Of the first step, by hand and by ours: both do the same."""
    flops_of_token: float
    peak: float | None
    memory: tuple[int, int]


def config_of(setup: Setup, folder: Path) -> RunConfig:
    """The run that is measured: as a user writes it, with metrics and data on."""
    source = "benchmarks.train_overhead:random_tokens" if setup.device == "cuda" else str(folder / "text.txt")
    return RunConfig(
        model=setup.model,
        model_options=setup.options,
        weights="none",
        data=DataConfig(source=source, sequence_length=setup.length),
        optimizer=OptimizerConfig(learning_rate=3e-4),
        training=TrainingConfig(steps=10**6, batch_size=setup.batch_size, sample=None),
        checkpoint=CheckpointConfig(every=None),
        folder=str(folder / "run"),
    )


class RandomTokens:
    """Sequences of random tokens, as fast to make as a file of tokens is to read."""

    def __init__(self, length: int, *, vocab_size: int = 128_000, read_s: float = 0.0) -> None:
        self.length, self.read_s = length, read_s
        self.tokens = torch.randint(0, vocab_size, (1 << 24,), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens) // self.length - 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.read_s:
            time.sleep(self.read_s)
        begin = index * self.length
        row = self.tokens[begin : begin + self.length + 1]
        return {"input_ids": row[:-1], "labels": row[1:]}


def random_tokens(config: DataConfig) -> RandomTokens:
    """The data of the GPU's run, for `data.source`."""
    return RandomTokens(config.sequence_length)


def slow_tokens(config: DataConfig) -> RandomTokens:
    """Samples that each take a while to come, as from a disk far away; a batch nearly as long as a tiny step."""
    return RandomTokens(config.sequence_length, vocab_size=500, read_s=0.001)


def steps_of(run: TrainingRun, count: int) -> None:
    """Make some more steps of a run, by the loop that `shardwise train` runs."""
    run.config = replace(run.config, training=replace(run.config.training, steps=run.step + count))
    run.step_metrics.restart_clock()
    train(run, StopRequest())


@contextmanager
def ours(setup: Setup, folder: Path) -> Iterator[TrainingRun]:
    """A run as `fit` has it, guarded."""
    with open_run(config_of(setup, folder), NoProgress()) as run, guard(run.model), explained(run.model):
        yield run


def measure(setup: Setup, folder: Path) -> Measured:
    """Everything of one setup on this rank.

    Ranks:
        Collective.
    """
    mesh = init_distributed(MeshConfig(device="cuda" if setup.device == "cuda" else "cpu"))
    with ours(setup, folder) as run:
        batches = [next(run.loader) for _ in range(8)]
        run.data.load_state_dict({"steps": 0, "left_out": [], "source": _rewound(run)})
        model = by_hand(setup.model, setup.options, mesh) if setup.device == "cuda" else by_us(setup, mesh)
        copy_weights(run.model, model)
        bare = HandWritten(model, batches, lr=3e-4)
        bare.steps(1)
        steps_of(run, 1)
        losses = (mean_over_ranks(bare.loss, mesh=mesh).item(), _last_loss(run))
        bare.steps(2)
        steps_of(run, 2)
        with gc_frozen():  # as `fit` does; here both have it
            steps = time_pairs(
                lambda: bare.steps(setup.num_steps),
                lambda: steps_of(run, setup.num_steps),
                num_pairs=setup.num_pairs,
                device=setup.device,
            )
        flops = flops_per_token(run.model, setup.length)
        peak = peak_flops(torch.device(setup.device))
        memory = (torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()) if peak else (0, 0)
    starts = _time_starts(setup, folder, mesh) if setup.num_starts else None
    waits = {workers: _waiting(folder, workers) for workers in (0, 1)} if setup.device == "cpu" else {}
    shutdown()
    return Measured(steps, starts, waits, losses, flops, peak, memory)


def by_us(setup: Setup, mesh: Any) -> torch.nn.Module:
    """The very model that ours trains: on the CPU only the loops are compared, `benchmarks.step` compares the rest."""
    return materialize(shard(load_model(setup.model, options=setup.options), mesh=mesh))


def _rewound(run: TrainingRun) -> dict[str, Any]:
    return {**run.loader.state_dict(), "samples": 0, "epoch": 0}


def _last_loss(run: TrainingRun) -> float:
    run.step_logger.log(run.step_metrics.flush())
    return run.step_logger.last_loss or float("nan")


def _time_starts(setup: Setup, folder: Path, mesh: Any) -> Timed:
    """From settings to the end of the first step, in processes that have imported everything."""

    def start_ours() -> None:
        with ours(setup, folder) as run:
            steps_of(run, 1)

    def start_bare() -> None:
        model = by_hand(setup.model, setup.options, mesh)
        bytes_ = torch.frombuffer(bytearray((folder / "text.txt").read_bytes()), dtype=torch.uint8)
        rows, length = setup.batch_size // setup.num_ranks, setup.length
        begin = mesh.get_local_rank() * rows * length
        tokens = bytes_[begin : begin + rows * length + 1].long()
        batch = {"input_ids": tokens[:-1].view(rows, length), "labels": tokens[1:].view(rows, length)}
        batch["document_ids"] = torch.zeros(rows, length, dtype=torch.int32)  # what ours passes to the model too
        batch["position_ids"] = torch.arange(length).expand(rows, length)
        HandWritten(model, [batch], lr=3e-4).steps(1)

    start_ours(), start_bare()  # the first of each pays for what the process loads once
    return time_pairs(start_bare, start_ours, num_pairs=setup.num_starts, device=setup.device)


def _waiting(folder: Path, workers: int) -> float:
    """Which part of a tiny model's steps waits for samples that are slow to read."""
    setup = Setup("llama3-debug", _TINY, "cpu", dist.get_world_size(), 32, 64, 0, 0, 0)
    config = config_of(setup, folder)
    data = replace(config.data, source="benchmarks.train_overhead:slow_tokens", workers=workers)
    config = replace(config, data=data, folder=str(folder / f"workers-{workers}"))
    with open_run(config, NoProgress()) as run:
        steps_of(run, 5)
        seconds, waits = run.step_logger.seconds, []
        run.metrics.on_record = lambda _, values: waits.append(values["data_wait_s"])
        steps_of(run, 40)
        return sum(waits) / (run.step_logger.seconds - seconds)


def write_data(folder: Path) -> None:
    """One text of this Python's own sources."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    (folder / "text.txt").write_text("\n".join(path.read_text(errors="replace") for path in sources))


def results_of(setup: Setup, by_rank: list[Measured]) -> list[Result]:
    """The rows; the first rank speaks where ranks agree."""
    first = by_rank[0]
    name = f"train/{setup.model}/{setup.device}/{setup.num_ranks} rank{'s' if setup.num_ranks > 1 else ''}"
    rows = [
        _ratio_row(f"{name}: step against by hand", [m.steps.wall for m in by_rank], setup.num_steps, STEP_GOAL),
        _ratio_row(f"{name}: CPU time of a step", [m.steps.cpu for m in by_rank], setup.num_steps, STEP_GOAL),
    ]
    if first.starts is not None:
        starts = [m.starts for m in by_rank if m.starts is not None]
        rows.append(_ratio_row(f"{name}: time to first step", [one.wall for one in starts], 1, FIRST_GOAL))
    theirs, own = first.losses
    rows.append(
        Result(case=f"{name}: first loss", value=own, unit="", baseline=theirs, ratio=own / theirs,
               goal=SAME_LOSS, met=abs(own - theirs) <= 1e-3 * abs(theirs))
    )  # fmt: skip
    rows += [_speed_row(name, setup, by_rank)] if setup.device == "cuda" else []
    for workers, share in first.waits.items():
        goal = {"goal": f"<= {WAIT_GOAL}", "met": share <= WAIT_GOAL} if workers else {}
        rows.append(Result(case=f"train/data-bound: waiting for data, {workers} workers", value=share, unit="", **goal))
    return rows


def _ratio_row(case: str, by_rank: list[Pairs], num_steps: int, goal: float) -> Result:
    pairs = slowest(by_rank)
    ratio = median(pairs.ratios)
    baseline, value = (median(times) / num_steps * 1e3 for times in (pairs.baseline_s, pairs.candidate_s))
    return Result(
        case=case,
        value=value,
        unit="ms",
        baseline=baseline,
        ratio=ratio,
        interval=median_interval(pairs.ratios),
        goal=f"<= {goal}",
        met=ratio <= goal,
        details={"pairs": len(pairs.ratios), "steps_per_stretch": num_steps},
    )


def _speed_row(name: str, setup: Setup, by_rank: list[Measured]) -> Result:
    pairs, first = slowest([m.steps.wall for m in by_rank]), by_rank[0]
    rates = [setup.tokens * setup.num_steps / median(times) for times in (pairs.baseline_s, pairs.candidate_s)]
    ratio = 1 / median(pairs.ratios)
    utilisation = [mfu(rate, first.flops_of_token, setup.num_ranks, first.peak) for rate in rates]
    return Result(
        case=f"{name}: tokens a second against by hand",
        value=rates[1],
        unit="tokens/s",
        baseline=rates[0],
        ratio=ratio,
        goal=f">= {SPEED_GOAL}",
        met=ratio >= SPEED_GOAL,
        details={"mfu": utilisation[1], "mfu_by_hand": utilisation[0], "tokens_per_step": setup.tokens,
                 "flops_of_token": first.flops_of_token, "peak_flops": first.peak, "memory_bytes": first.memory[0]},
    )  # fmt: skip


def setup_of(options: Any) -> Setup:
    if options.device == "cuda":
        toy = {"num_layers": 2} if options.toy else {}
        pairs = (2, 1) if options.toy else (options.pairs, options.steps)
        rows, length = options.batch or 8, options.length or 2048
        return Setup("llama3-1b", toy, "cuda", options.ranks or 1, rows, length, *pairs, 0)
    num_ranks = options.ranks or 2
    if options.toy:
        return Setup("llama3-debug", _TINY, "cpu", num_ranks, 4, 32, 2, 1, 1)
    rows, length = options.batch or 16, options.length or 256
    return Setup("llama3-bytes", {}, "cpu", num_ranks, rows, length, options.pairs, options.steps, options.starts)


def main() -> int:
    options = parse(
        "What the loop of shardwise train costs beside a hand-written one.",
        toy_help="tiny models, two pairs: does it run?",
        add=_add_options,
    )
    if options.soak:
        report("train_overhead", soak_results(options.soak, options.ranks or 1), save=options.save)
        return 0
    setup = setup_of(options)
    with tempfile.TemporaryDirectory(prefix="train-overhead-") as folder:
        write_data(Path(folder))
        by_rank = on_ranks("benchmarks.train_overhead:measure", setup.num_ranks, setup, Path(folder))
    results = results_of(setup, by_rank)
    report("train_overhead", results, save=options.save)
    return int(any(result.met is False for result in results if result.goal == SAME_LOSS))


def _add_options(parser: Any) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="steps in each half of a pair")
    parser.add_argument("--starts", type=int, default=6, help="pairs of first steps")
    parser.add_argument("--batch", type=int, default=0, help="sequences of a step, over all ranks")
    parser.add_argument("--length", type=int, default=0, help="tokens of a sequence")
    parser.add_argument("--soak", type=int, default=0, metavar="N", help="only: N steps of a tiny model")


if __name__ == "__main__":
    from benchmarks import train_overhead  # under this name the ranks find its classes

    sys.exit(train_overhead.main())
