"""Training speed on one GPU, row by row: `shardwise train` with its defaults, and what it is compared with.

python -m benchmarks.gpu train-8b train-1b --save      each row in a process of its own, one after the other
python -m benchmarks.gpu --list                        the rows
python -m benchmarks.gpu moe moe-looped --toy          small models, a few steps, also without a GPU

World size 1: nothing is communicated. Random tokens, fp32 parameters and Adam states, bf16 compute, clipping on.
MFU counts `6 N + 12 L W S` operations a token against the GPU's stated bf16 peak; of experts, N counts those that a
token passes. Causal MFU counts half of attention. The ceiling is one large bf16 matrix product, measured beside. A row
that takes nine minutes has failed.
"""

import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

import shardwise as sw
from benchmarks import peers
from benchmarks.measuring import median
from benchmarks.reporting import Result, parse, report
from benchmarks.train_overhead import RandomTokens, steps_of
from shardwise.config.run import CheckpointConfig, DataConfig, OptimizerConfig, RunConfig, TrainingConfig
from shardwise.diagnosing.guard import explained, guard
from shardwise.models import llama, moe
from shardwise.models.grouped_experts import GroupedExperts, count_tokens
from shardwise.models.load import load_model
from shardwise.progress import NoProgress
from shardwise.training import run as run_module
from shardwise.training.loop import gc_frozen
from shardwise.training.metrics import flops_per_token, peak_flops

_TOY_LENGTH = 64
_MOST_SECONDS = 540


@dataclass(frozen=True)
class Row:
    """One thing to measure."""

    model: str
    batch: int
    length: int = 8192
    kind: str = "train"
    """`train`: the loop of `shardwise train`. `looped`: that with one expert after another, not grouped. `text`: that
    on the standard library's sources, a byte a token, for the losses. `plain`: a loop on `sw.shard`, compiled blocks,
    torch's fused AdamW, torch's cross-entropy. `unwrapped`: that loop without sharding, under autocast. `pictures`: the
    loop of `shardwise train` on the multimodal model. Others: see `benchmarks.peers`."""
    goal: float | None = None
    """MFU."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Of `ShardConfig`, where they are not the defaults."""
    lora: sw.LoraConfig | None = None
    recompute: bool = False
    """Of peers: whether layers are recomputed in backward."""
    capped_gib: float | None = None
    """What the allocator may take of the GPU's memory."""
    warmup: int = 10
    steps: int = 30
    """Steps that are timed."""

    @property
    def num_steps(self) -> int:
        """With the first after the warm-up, which starts the clock."""
        return self.warmup + self.steps + 1


_FLOAT8 = (("float8", sw.Float8Config(recipe="tensorwise")),)
ROWS = {
    "train-8b": Row("llama3-8b", 1, goal=0.60),
    "train-8b-batch4": Row("llama3-8b", 4, goal=0.65, warmup=3, steps=10),
    "train-8b-batch2": Row("llama3-8b", 2, warmup=3, steps=15),
    "train-3b": Row("llama3-3b", 2, 4096, goal=0.58),
    "train-3b-batch4": Row("llama3-3b", 4, 4096, goal=0.58),
    "train-1b": Row("llama3-1b", 2, goal=0.62),
    "train-1b-batch8": Row("llama3-1b", 8, goal=0.62),
    "train-8b-float8": Row("llama3-8b", 1, goal=0.75, settings=_FLOAT8),
    "train-1b-float8": Row("llama3-1b", 2, settings=_FLOAT8),
    "text-1b": Row("llama3-1b", 4, 2048, kind="text", warmup=0, steps=300),
    "text-1b-float8": Row("llama3-1b", 4, 2048, kind="text", warmup=0, steps=300, settings=_FLOAT8),
    "lora-8b": Row("llama3-8b", 1, lora=sw.LoraConfig(), warmup=3, steps=5),
    "qlora-8b": Row("llama3-8b", 1, lora=sw.LoraConfig(quantize="nf4"), warmup=3, steps=5),
    "moe": Row("moe-3b-a1b", 2, goal=0.40),
    "moe-looped": Row("moe-3b-a1b", 2, kind="looped", warmup=5, steps=15),
    "plain-8b-selective": Row("llama3-8b", 1, kind="plain", settings=(("activations", "selective"),)),
    "plain-1b": Row("llama3-1b", 2, kind="plain"),
    "unwrapped-1b": Row("llama3-1b", 2, kind="unwrapped"),
    "trainer-1b-batch2": Row("llama3-1b", 2, kind="trainer"),
    "trainer-1b-batch4": Row("llama3-1b", 4, kind="trainer"),
    "trainer-1b-batch6": Row("llama3-1b", 6, kind="trainer"),
    "trainer-8b": Row("llama3-8b", 1, kind="trainer", recompute=True),
    "trainer-8b-batch2": Row("llama3-8b", 2, kind="trainer", recompute=True, warmup=4),
    "lightning-1b-batch2": Row("llama3-1b", 2, kind="lightning"),
    "lightning-1b-batch4": Row("llama3-1b", 4, kind="lightning"),
    "lightning-8b": Row("llama3-8b", 1, kind="lightning", recompute=True),
    "offload-6b": Row("benchmarks.gpu:llama_6b", 1, settings=(("offload", True),), capped_gib=40, warmup=1, steps=5),
    "pictures": Row("benchmarks.peers:seeing_model", 4, 1024, kind="pictures"),
    "pictures-tutorial": Row("benchmarks.peers:seeing_model", 4, 1024, kind="tutorial"),
}
_CLASSES = {
    "attention": ("sdpa", "flash", "cudnn", "fmha"),
    "matrix products": ("gemm", "nvjet", "cutlass", "matmul"),
    "memory copies": ("memcpy", "memset"),
    "compiled": ("triton",),
}


Steps = tuple[Callable[[int], None], dict[str, Any]]
"""A function that makes some steps, and what is known of the recipe."""


def train_steps(row: Row, folder: str, stack: ExitStack) -> Steps:
    """The loop of `shardwise train`."""
    run_module.check_disk = lambda *_: []  # nothing is saved here
    config = RunConfig(
        model=row.model,
        weights="none",
        lora=row.lora,
        data=data_of(row),
        shard=replace(sw.ShardConfig(), **dict(row.settings)),
        optimizer=OptimizerConfig(learning_rate=3e-4),
        training=TrainingConfig(steps=10**6, batch_size=row.batch, sample=None),
        checkpoint=CheckpointConfig(every=None),
        folder=folder,
    )
    run = stack.enter_context(run_module.open_run(config, NoProgress()))
    stack.enter_context(guard(run.model))
    stack.enter_context(explained(run.model))
    found: dict[str, Any] = {"optimizer": type(run.optimizer).__name__}

    def steps(count: int) -> None:
        steps_of(run, count)
        found["micro_batch_size"] = run.microbatches.size
        found["retries_of_the_run"] = run.microbatches.num_halvings

    return steps, found


def data_of(row: Row) -> DataConfig:
    """What `shardwise train` reads."""
    if row.kind == "text":
        return DataConfig(sequence_length=row.length, keep_apart=False)
    source = "benchmarks.peers:pictures" if row.kind == "pictures" else "benchmarks.gpu:random_tokens"
    return DataConfig(source=source, sequence_length=row.length)


def llama_6b() -> torch.nn.Module:
    """Llama-3.1-8B with 23 of its 32 layers: 6.07B parameters; a small one where there is no GPU."""
    on_gpu = torch.cuda.is_available()
    return load_model("llama3-8b", options={"num_layers": 23}) if on_gpu else load_model("llama3-debug")


def random_tokens(config: DataConfig) -> RandomTokens:
    """The data of a row, for `data.source` too; of a few words for small models."""
    return RandomTokens(config.sequence_length, vocab_size=128_000 if config.sequence_length > _TOY_LENGTH else 500)


@torch.compiler.disable
def loop_over_experts(
    experts: GroupedExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward of experts that run one after another; how many tokens each has reaches the host first."""
    places = top_k_index.flatten().argsort(stable=True).split(count_tokens(top_k_index, experts.num_experts).tolist())
    weights, mixed = top_k_weights.flatten().to(hidden_states.dtype), torch.zeros_like(hidden_states)
    for gate_up, down, mine in zip(experts.gate_up_proj.unbind(), experts.down_proj.unbind(), places, strict=True):
        rows = mine // top_k_index.shape[1]
        gate, up = F.linear(hidden_states[rows], gate_up).chunk(2, -1)
        mixed = mixed.index_add(0, rows, F.linear(F.silu(gate) * up, down) * weights[mine, None])
    return mixed


def plain_steps(row: Row) -> Steps:
    """A loop as a user writes it."""
    mesh = sw.init_distributed()
    device = mesh.device_type
    config = replace(sw.ShardConfig(), **({"compile": True} | dict(row.settings)))
    model: Any = load_model(row.model)
    if row.kind == "plain":
        model = sw.materialize(sw.shard(model, config, mesh=mesh))
    else:
        model = sw.materialize(sw.compile_blocks(model), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    data, position = random_tokens(DataConfig(sequence_length=row.length)), 0

    def steps(count: int) -> None:
        nonlocal position
        for _ in range(count):
            rows = [data[(position + number) % len(data)] for number in range(row.batch)]
            position += row.batch
            batch = {name: torch.stack([each[name] for each in rows]).to(device, non_blocking=True) for name in rows[0]}
            with torch.autocast(device, torch.bfloat16) if row.kind == "unwrapped" else nullcontext():
                logits = model(batch["input_ids"])
            F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten()).backward()
            sw.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return steps, {}


def measure(row: Row, folder: str, stack: ExitStack) -> dict[str, Any]:
    """Everything of one row, in this process."""
    torch.set_float32_matmul_precision("high")
    if row.kind == "looped":
        GroupedExperts.forward = loop_over_experts  # pyrefly: ignore[bad-assignment]
    started, on_gpu = time.perf_counter(), torch.cuda.is_available()
    if on_gpu and row.capped_gib is not None:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(row.capped_gib * 2**30 / whole)
    steps, found = None, dict[str, Any]()
    if row.kind in peers.RUNS:
        tokens = random_tokens(DataConfig(sequence_length=row.length))
        with StepTimes(row.warmup) as clock:
            peers.RUNS[row.kind](row, tokens, folder)
        times, retries = clock.seconds(row.steps), 0
    else:
        is_plain = row.kind in ("plain", "unwrapped")
        steps, found = plain_steps(row) if is_plain else train_steps(row, folder, stack)
        steps(row.warmup)
        synchronize()
        found["set-up and warm-up s"] = round(time.perf_counter() - started, 1)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        retries = num_retries()
        with gc_frozen(), StepTimes() as clock:
            steps(row.steps + 1)
        times = clock.seconds(row.steps)
    if row.kind == "text":
        found["losses"] = losses_of(Path(folder))
    rate = row.batch * row.length / median(times)
    found |= {"step_ms": round(median(times) * 1e3, 1), "steps": row.steps}
    if not on_gpu:
        return {"rate": rate, **found}
    found |= {
        "allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 1),
        "allocator_retries": num_retries() - retries,
    }
    if steps is not None:
        found |= {"kernels_ms": kernel_times(steps, median(times) * 1e3)}
        found |= {} if row.capped_gib else {"host_waits": host_waits(steps)}  # an optimizer on the CPU waits anyway
    shape = (llama.SHAPES | moe.SHAPES).get(row.model)
    if shape is not None:
        flops, peak = flops_per_token(load_model(row.model), row.length), peak_flops("cuda") or float("nan")
        causal = flops - 6.0 * shape.num_layers * shape.hidden_size * row.length
        found |= {"mfu": round(rate * flops / peak, 4), "causal_mfu": round(rate * causal / peak, 4)}
        found["ceiling_tflops"] = round(ceiling() / 1e12, 1)
        found["percent_of_ceiling"] = round(100 * rate * flops / (found["ceiling_tflops"] * 1e12), 1)
    return {"rate": rate, **found}


class StepTimes:
    """When each optimizer step was through, on the GPU's own clock: nothing waits for the GPU between steps.

    Args:
        warmup: Steps that are not timed; the first after them only starts the clock.
    """

    def __init__(self, warmup: int = 0) -> None:
        self._warmup, self._events = warmup, list[torch.cuda.Event | float]()

    def __enter__(self) -> Self:
        self._handle = register_optimizer_step_post_hook(lambda *_: self._record())
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _record(self) -> None:
        event: torch.cuda.Event | float = time.perf_counter()
        if torch.cuda.is_available():
            if len(self._events) == self._warmup:
                torch.cuda.reset_peak_memory_stats()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._events.append(event)

    def seconds(self, count: int) -> list[float]:
        """Of each timed step."""
        synchronize()
        events: list[Any] = self._events[self._warmup :]
        if len(events) != count + 1:
            raise RuntimeError(f"{len(self._events)} optimizer steps were made, not {self._warmup + count + 1}")
        pairs = pairwise(events)
        return [a.elapsed_time(b) / 1e3 if torch.cuda.is_available() else b - a for a, b in pairs]


def num_retries() -> int:
    """How often the allocator had to free cached memory before it could allocate."""
    return torch.cuda.memory_stats()["num_alloc_retries"] if torch.cuda.is_available() else 0


def losses_of(folder: Path) -> dict[str, float]:
    """Means of a run's losses over thirty steps each, by the last of the steps."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    return {str(end): round(sum(losses[end - 30 : end]) / 30, 4) for end in range(30, len(losses) + 1, 30)}


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def toy(row: Row) -> Row:
    """The row with a small model and a few steps."""
    model = "moe-debug" if row.model in moe.SHAPES else "llama3-debug" if row.model in llama.SHAPES else row.model
    return replace(row, model=model, length=_TOY_LENGTH, goal=None, warmup=1, steps=5)


def kernel_times(steps: Callable[[int], None], step_ms: float) -> dict[str, float]:
    """Milliseconds of a step by class of kernel, in which the GPU is idle, and of transfers from and to the host."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        steps(2)
        torch.cuda.synchronize()
    spent: dict[str, float] = {}
    ranges: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.lower()
            kind = next((kind for kind, parts in _CLASSES.items() if any(part in name for part in parts)), "other")
            spent[kind] = spent.get(kind, 0.0) + event.device_time / 2e3
            is_transfer = "memcpy" in name and ("htod" in name or "dtoh" in name)
            ranges[is_transfer].append((event.time_range.start, event.time_range.end))
    transfers, busy = merged(ranges[True]), merged(ranges[False])
    together = length(merged([*transfers, *busy]))
    beside = (length(transfers) + length(busy) - together) / 2e3
    spent["idle"] = step_ms - together / 2e3
    spent |= {"transfers": length(transfers) / 2e3, "transfers beside kernels": beside} if beside else {}
    return {kind: round(milliseconds, 1) for kind, milliseconds in spent.items()}


def merged(ranges: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Ranges of time without overlaps."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def length(ranges: list[tuple[float, float]]) -> float:
    """Of all ranges together."""
    return sum(end - start for start, end in ranges)


def host_waits(steps: Callable[[int], None]) -> list[str]:
    """Places where the host waits for the GPU, as far as torch sees them; the last of the steps reads the loss."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps(3)
    torch.cuda.set_sync_debug_mode("default")
    places = [f"{Path(each.filename).name}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)]
    return [f"{place} ({places.count(place)})" for place in dict.fromkeys(places)]


def ceiling() -> float:
    """Operations a second of one large matrix product in bf16, measured beside."""
    torch.cuda.empty_cache()
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        left @ right
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(30):
        left @ right
    torch.cuda.synchronize()
    return 30 * 2 * 8192**3 / (time.perf_counter() - begin)


def result_of(name: str, row: Row, found: dict[str, Any]) -> Result:
    """The row as it is kept."""
    rate = found.pop("rate")
    case = f"gpu/{name}: {row.model}, {row.batch} x {row.length} tokens"
    goal = {} if row.goal is None else {"goal": f"MFU >= {row.goal}", "met": found["mfu"] >= row.goal}
    return Result(case=case, value=round(rate), unit="tokens/s", **goal, details={**asdict(row), **found})


def main() -> int:
    options = parse(__doc__ or "", toy_help="small models, a few steps; on a GPU or not", add=_add_options)
    if options.list:
        print("\n".join(ROWS))
        return 0
    rows = {name: toy(row) if options.toy else row for name, row in ROWS.items()}
    if options.here:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            print("FOUND " + json.dumps(measure(rows[options.rows[0]], folder, stack)), flush=True)
        return 0
    status = 0
    for name in options.rows:
        command = [sys.executable, "-m", "benchmarks.gpu", name, "--here", *(["--toy"] if options.toy else [])]
        # Messages go straight to the terminal, so that a run that is killed shows how far it came.
        try:
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_MOST_SECONDS).stdout
        except subprocess.TimeoutExpired:
            output = f"it took longer than {_MOST_SECONDS} s"
        found = [line for line in output.splitlines() if line.startswith("FOUND ")]
        if not found:
            print(f"{name} failed:\n{output[-1500:]}", flush=True)
            status = 1
            continue
        report("gpu", [result_of(name, rows[name], json.loads(found[0].removeprefix("FOUND ")))], save=options.save)
    return status


def _add_options(parser: Any) -> None:
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], help="which, by name")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--here", action="store_true", help="measure one row in this process")


if __name__ == "__main__":
    sys.exit(main())
