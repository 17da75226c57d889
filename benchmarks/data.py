"""The loader: what a batch costs, whether it is ahead of the step, and what numbering the samples of an epoch costs.

python -m benchmarks.data
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.measuring import median, median_interval, time_pairs
from benchmarks.reporting import Result, parse, report
from shardwise.config.run import DataConfig
from shardwise.training.data import Loader, open_data
from shardwise.training.data.loader import samples_at
from shardwise.training.data.reading import standard_library_files


def opened(config: DataConfig, batch_size: int) -> Loader:
    return open_data(config, batch_size=batch_size, rank=0, num_ranks=1, seed=0, vocab_size=257, device="cpu")


def by_hand(length: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What a careful engineer writes for one epoch in memory: shuffled starts, a slice for each row, shifted labels."""
    text = torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in standard_library_files())), dtype=torch.uint8
    )
    order = torch.randperm((len(text) - 1) // length)
    while True:
        for first in range(0, len(order) - batch_size, batch_size):
            rows = [
                text[i * length : i * length + length + 1].long() for i in order[first : first + batch_size].tolist()
            ]
            tokens = torch.stack(rows)
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def cost_of_batches(batch_size: int, length: int, num_pairs: int, num_batches: int) -> Result:
    """CPU time, all in one thread; ours also finds documents, masks their borders and numbers positions."""
    baseline = by_hand(length, batch_size)
    with opened(DataConfig(sequence_length=length, workers=0), batch_size) as loader:
        times = time_pairs(
            lambda: [next(baseline) for _ in range(num_batches)],
            lambda: [next(loader) for _ in range(num_batches)],
            num_pairs=num_pairs,
        )
    tokens = batch_size * length * num_batches
    return Result(
        case=f"batch of {batch_size} x {length} bytes: CPU time against slicing one tensor (no documents, no position)",
        value=median(times.cpu.candidate_s) / num_batches * 1e3,
        unit="ms",
        baseline=median(times.cpu.baseline_s) / num_batches * 1e3,
        ratio=median(times.cpu.ratios),
        interval=median_interval(times.cpu.ratios),
        details={"tokens_per_cpu_s": round(tokens / median(times.cpu.candidate_s))},
    )


def ahead_of_the_step(folder: Path, num_steps: int) -> list[Result]:
    """Data-bound: JSONL read line by line, and a step that takes 1.5 times as long as its batch."""
    path = folder / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": "some words " * 180}) + "\n" for _ in range(4000)))
    config = DataConfig(source=str(path), sequence_length=2048, pack=False)
    waited = {}
    for workers in (0, 1, 2):
        with opened(DataConfig(**{**_settings(config), "workers": workers}), 64) as loader:
            start = time.perf_counter()
            next(loader)
            if workers == 0:
                step_s = 1.5 * (time.perf_counter() - start)
            _ = loader.take_wait_s()
            for _ in range(num_steps):
                time.sleep(step_s)  # a GPU's step: the CPU has nothing to do
                next(loader)
            waited[workers] = loader.take_wait_s() / num_steps
    return [
        Result(
            case=f"data-bound step: share of the time that it waits, {workers} worker(s), against none",
            value=waited[workers] / (waited[workers] + step_s) * 100,
            unit="%",
            baseline=waited[0] / (waited[0] + step_s) * 100,
            goal="<= 2 %",
            met=waited[workers] / (waited[workers] + step_s) <= 0.02,
            details={"step_ms": step_s * 1e3, "wait_ms": waited[workers] * 1e3},
        )
        for workers in (1, 2)
    ]


def order_of_many(num_samples: int, count: int) -> Result:
    """Any part of a shuffled epoch is computed; the usual way holds all of it."""
    start = time.process_time()
    samples_at(torch.arange(num_samples // 2, num_samples // 2 + count), num_samples, seed=0, shuffle=True)
    ours = time.process_time() - start
    start = time.process_time()
    torch.randperm(num_samples)[num_samples // 2 : num_samples // 2 + count]
    return Result(
        case=f"{count} samples of a shuffled epoch of {num_samples:,}: CPU time against randperm",
        value=ours * 1e3,
        unit="ms",
        baseline=(time.process_time() - start) * 1e3,
        details={"bytes_of_randperm": 8 * num_samples},
    )


def _settings(config: DataConfig) -> dict:
    return {name: getattr(config, name) for name in config.__slots__}


def main() -> int:
    options = parse("What data costs.", toy_help="few batches")
    pairs, batches, steps, many = (2, 3, 3, 10**5) if options.toy else (15, 50, 40, 10**8)
    results = [cost_of_batches(*shape, pairs, batches) for shape in ((8, 256), (32, 2048))]
    with tempfile.TemporaryDirectory() as folder:
        results += ahead_of_the_step(Path(folder), steps)
    results.append(order_of_many(many, 512))
    report("data", results, save=options.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
