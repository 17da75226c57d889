"""Checkpoints of shardwise against torch's own and against raw system calls.

python -m benchmarks.checkpoint                        1, 2 and 4 gloo ranks on this machine's CPU, 1.07 GB
python -m benchmarks.checkpoint --device cuda          one GPU
python -m benchmarks.checkpoint --only async           what a save costs the training that continues
"""

import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import checkpoint_async
from benchmarks.checkpoint_cases import Measured, Setup
from benchmarks.checkpoint_state import Stretch, Times, write_hugging_face_folder
from benchmarks.measuring import median, median_interval
from benchmarks.processes import on_ranks
from benchmarks.reporting import Result, parse, report

CHAIN = (4, 2, 3, 1)
"""Numbers of ranks between which checkpoints are moved, each read by the next."""
MAX_EXTRA_BYTES = 256 << 20


def rows_of(setup: Setup, by_rank: list[Measured]) -> list[Result]:
    """The rows of one set of ranks. Stretches begin and end together, so any rank's times do."""
    times, numbers = by_rank[0].times, by_rank[0].numbers
    where = f"{setup.device}, {setup.num_ranks} ranks"
    num_bytes = numbers["bytes"]
    rows = []
    if save := times.get("save"):
        name = f"save/{where}"
        rows.append(_speedup(f"{name}: against dcp.save", save, "dcp", 2.0, num_bytes))
        if "raw" in save:
            best, how = _best_raw(save)
            rows.append(_speedup(f"{name}: against raw write {how}", save, best, 0.8, num_bytes))
        rows.append(_hashing(f"{name}: checksums by themselves", save["ours"], numbers["hashing"]))
    for cache in ("warm", "cold"):
        if load := times.get(f"load, {cache}"):
            name = f"load/{where}, {cache}"
            rows.append(_speedup(f"{name}: against dcp.load", load, "dcp", 2.0, num_bytes))
            rows += _limit(name, load, "dcp", num_bytes)
            rows.append(_cost(f"{name}: cost of checksums", load, "ours unchecked", num_bytes))
        if read := times.get(f"safetensors, {cache}"):
            name = f"safetensors/{where}, {cache}"
            rows.append(_speedup(f"{name}: against HuggingFaceStorageReader", read, "torch reader", 2.5, num_bytes))
            rows += _limit(name, read, "torch reader", num_bytes)
            if "raw" in read:
                rows.append(_speedup(f"{name}: against raw preadv", read, "raw", 0.85, num_bytes))
    if others := times.get("safetensors, other ways"):
        for other in others:
            if other != "ours":
                rows.append(_speedup(f"safetensors/{where}, warm: against {other}", others, other, None, num_bytes))
        rows.append(_extra_memory(where, max(one.numbers["safetensors extra"] for one in by_rank)))
    reshard = times.get("reshard", {})
    for name in reshard:
        if name != "same":
            case = f"reshard/{setup.device}, {name} ranks: against the same layout"
            rows.append(_resharding(case, reshard, name, num_bytes))
    return rows


def _best_raw(times: Times) -> tuple[str, str]:
    """Which of the raw ways is the faster one, and what it is called."""
    ways = {
        "raw": "through the page cache",
        "raw on all cores": "through the page cache on all cores",
        "raw direct": "past the page cache",
    }
    best = min((way for way in ways if way in times), key=lambda way: median([each.wall_s for each in times[way]]))
    return best, ways[best]


def _limit(name: str, times: Times, baseline: str, num_bytes: float) -> list[Result]:
    """How many times faster than the baseline the bytes can be read at all: no goal above it can be met."""
    if "raw" not in times:
        return []
    best, how = _best_raw(times)
    what = "dcp.load" if baseline == "dcp" else "HuggingFaceStorageReader"
    case = f"{name}: raw read {how} against {what}"
    return [_compared(case, times[baseline], times[best], lambda raw, theirs: theirs / raw, num_bytes)]


def _hashing(case: str, saves: list[Stretch], hashing_s: float) -> Result:
    save_s = median([each.wall_s for each in saves])
    return Result(case=case, value=hashing_s, unit="s", baseline=save_s, ratio=hashing_s / save_s)


def _speedup(case: str, times: Times, baseline: str, goal: float | None, num_bytes: float) -> Result:
    """How many times faster than the baseline, round by round."""
    goal_text = "" if goal is None else f">= {goal}"
    row = _compared(case, times[baseline], times["ours"], lambda ours, theirs: theirs / ours, num_bytes, goal_text)
    return row if goal is None else replace(row, met=row.ratio is not None and row.ratio >= goal)


def _cost(case: str, times: Times, baseline: str, num_bytes: float) -> Result:
    """How many times longer than the baseline, round by round."""
    return _compared(case, times[baseline], times["ours"], lambda ours, theirs: ours / theirs, num_bytes)


def _resharding(case: str, times: Times, name: str, num_bytes: float) -> Result:
    row = _compared(case, times["same"], times[name], lambda ours, theirs: ours / theirs, num_bytes, "<= 1.2")
    return replace(row, met=row.ratio is not None and row.ratio <= 1.2)


def _compared(
    case: str,
    theirs: list[Stretch],
    ours: list[Stretch],
    compare: Callable[[float, float], float],
    num_bytes: float,
    goal: str = "",
) -> Result:
    pairs = list(zip(ours, theirs, strict=True))
    ratios = [compare(a.wall_s, b.wall_s) for a, b in pairs]
    value = median([each.wall_s for each in ours])
    return Result(
        case=case,
        value=value,
        unit="s",
        baseline=median([each.wall_s for each in theirs]),
        ratio=median(ratios),
        interval=median_interval(ratios),
        goal=goal,
        details={
            "rounds": len(ratios),
            "gb_per_s": round(num_bytes / value / 1e9, 2),
            "cpu_ratio": round(median([compare(a.cpu_s, b.cpu_s) for a, b in pairs]), 3),
        },
    )


def _extra_memory(where: str, extra: float) -> Result:
    return Result(
        case=f"safetensors/{where}: host memory beyond the shard",
        value=extra / (1 << 20),
        unit="MiB",
        goal=f"<= {MAX_EXTRA_BYTES >> 20}",
        met=extra <= MAX_EXTRA_BYTES,
    )


def run_files(options: Any, folder: Path) -> list[Result]:
    """Saving, loading, resharding, safetensors."""
    size, num_rounds = ("toy", 2) if options.toy else ("full", options.rounds)
    write_hugging_face_folder(folder / "hf", size)
    chain = [number for number in CHAIN if number <= max(options.ranks)]
    rows: list[Result] = []
    for place, number in enumerate(chain):
        setup = Setup(
            number,
            options.device,
            size,
            folder,
            num_rounds,
            layouts=tuple(chain[place - 1 : place]) if place else (),
            only_layouts=number not in options.ranks,
        )
        rows += rows_of(setup, on_ranks("benchmarks.checkpoint_cases:measure", number, setup))
    return rows


def run_async(options: Any, folder: Path) -> list[Result]:
    """Saves in the background, beside those of torch."""
    num_ranks = 1 if options.device == "cuda" else 2
    setup = checkpoint_async.Setup(
        num_ranks,
        options.device,
        "toy" if options.toy else "full",
        folder,
        num_saves=2 if options.toy else options.saves,
        model=options.model if options.device == "cuda" and not options.toy else "",
        modes=tuple(options.modes),
    )
    by_rank = on_ranks("benchmarks.checkpoint_async:measure", num_ranks, setup)
    where = f"{options.device}, {num_ranks} ranks"
    return _blocked_rows(where, setup, by_rank) + _step_rows(where, setup, by_rank[0])


def _blocked_rows(where: str, setup: checkpoint_async.Setup, by_rank: list[checkpoint_async.Measured]) -> list[Result]:
    """How long training stood still for a save, against each of torch's ways."""
    rows = []
    slowest = {name: [max(times) for times in zip(*(one.blocked_s[name] for one in by_rank), strict=True)]
               for name in by_rank[0].blocked_s}  # fmt: skip
    for mode in setup.modes:
        ratio = median(slowest["ours"]) / median(slowest[mode])
        rows.append(
            Result(
                case=f"async/{where}: training held up, against {mode}",
                value=median(slowest["ours"]) * 1e3,
                unit="ms",
                baseline=median(slowest[mode]) * 1e3,
                ratio=ratio,
                goal="<= 0.25",
                met=ratio <= 0.25,
                details={
                    "saves": len(slowest["ours"]),
                    "worst_ms": round(max(slowest["ours"]) * 1e3, 1),
                    "first_ms": {name: round(first * 1e3) for name, first in by_rank[0].first_s.items()},
                    "commit_s": {name: round(median(times), 2) for name, times in by_rank[0].commit_s.items()},
                    "load_s": {name: round(taken, 2) for name, taken in by_rank[0].load_s.items()},
                },
            )
        )
    return rows


def _step_rows(where: str, setup: checkpoint_async.Setup, measured: checkpoint_async.Measured) -> list[Result]:
    """Steps of a GPU while saves come at intervals longer than a save takes."""
    if not measured.steps_s:
        return []
    usual = median(measured.steps_s["none"])
    rows = []
    for name in ("ours", *setup.modes):
        steps = measured.steps_s[name]
        mean, worst = sum(steps) / len(steps), max(steps) / median(steps)
        interval = int(measured.numbers[f"{name}: steps between saves"])
        details = {"steps": len(steps), "steps_between_saves": interval}
        is_goal = name == "ours"
        case = f"async/{where}, {name}"
        rows.append(
            Result(
                case=f"{case}: mean step against the median without saves",
                value=mean * 1e3,
                unit="ms",
                baseline=usual * 1e3,
                ratio=mean / usual,
                goal="<= 1.03" if is_goal else "",
                met=mean / usual <= 1.03 if is_goal else None,
                details=details,
            )
        )
        rows.append(
            Result(
                case=f"{case}: slowest step against the median",
                value=max(steps) * 1e3,
                unit="ms",
                baseline=median(steps) * 1e3,
                ratio=worst,
                goal="<= 1.1" if is_goal else "",
                met=worst <= 1.1 if is_goal else None,
                details=details,
            )
        )
    return rows


def main() -> int:
    options = parse("Checkpoints against torch's own.", toy_help="a tiny model: does it run?", add=_add_options)
    rows: list[Result] = []
    if options.folder is not None:
        Path(options.folder).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="shardwise-bench-", dir=options.folder))
    try:
        if options.only in (None, "files"):
            rows += run_files(options, folder)
        if options.only in (None, "async"):
            rows += run_async(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report("checkpoint", rows, save=options.save)
    return 0  # times depend on the machine


def _add_options(parser: Any) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="on the disk to be measured; default: the system's temporary one")
    parser.add_argument("--only", choices=("files", "async"))
    parser.add_argument("--saves", type=int, default=5, help="in the background, of each kind")
    parser.add_argument("--model", default="llama3-1b", help="that a GPU trains")
    parser.add_argument("--modes", nargs="*", choices=checkpoint_async.MODES, default=list(checkpoint_async.MODES[:2]))


if __name__ == "__main__":
    from benchmarks import checkpoint  # under this name the ranks find its classes

    sys.exit(checkpoint.main())
