"""Do the tests notice small mistakes? Draw mutants of src/shardwise, run the tests that reach each, list the survivors.

python -m benchmarks.mutation map [--slow]                     which test files enter which functions; kept, resumable
python -m benchmarks.mutation draw --seed 1 --count 100        what would be tried
python -m benchmarks.mutation run --seed 1 --count 100 --out runs/mutants.jsonl
python -m benchmarks.mutation report --out runs/mutants.jsonl [--equivalent runs/equivalent.txt]

A mutant is killed when a test file that reaches it fails or takes far too long. The file of equivalent ones has a line
`index reason` for each mutant that no test could tell from the original.
"""

import argparse
import json
import signal
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.mutation_operators import Mutant, draw
from benchmarks.mutation_running import (
    PACKAGE,
    ROOT,
    START_S,
    Mapped,
    Workspace,
    hash_of,
    keep,
    on_workspaces,
    read_map,
)
from benchmarks.mutation_tracing import MODULE

BATCH_S = 60.0
"""Of test files that run in one process."""


def build_map(*, slow: bool, only: str, retry: bool) -> None:
    """Map every test file that changed since it was mapped, or never was; with `retry` also those that failed."""

    def work(workspace: Workspace, slow: bool) -> list[Mapped]:
        collected, known = workspace.collect(slow=slow), read_map(slow=slow)
        fresh = {file for file in collected if file in known and known[file].hash == hash_of(ROOT / file)}
        fresh -= {file for file in fresh if retry and known[file].status != "passed"}
        todo = [file for file in collected if file not in fresh and only in file]
        print(f"{len(collected)} test files, {len(fresh)} mapped already, {len(todo)} to be", flush=True)
        return list(workspace.map(todo, slow=slow)) if todo else []

    ((_, mapped),) = on_workspaces([slow], work, jobs=1)
    for entry in mapped:
        keep(entry)
        print(f"{entry.file}: {entry.status}, {entry.breadth} functions, {entry.seconds} s {entry.why}".rstrip())


def covering(mutant: Mutant, mapped: list[Mapped]) -> list[Mapped]:
    """The test files that reach a mutant, those that fail for it soonest first: cheap ones, and ones about its module.

    A nested function that no file was seen to enter (C++ threads call some) counts as reached with the one around it.
    """
    usable = [entry for entry in mapped if entry.status == "passed" and (ROOT / entry.file).is_file()]
    found: list[Mapped] = []
    for function in mutant.functions:
        found = found or [entry for entry in usable if f"{mutant.file}::{function}" in entry.functions]
    if not mutant.functions:
        importing = [entry for entry in usable if f"{mutant.file}::{MODULE}" in entry.functions]
        found = [entry for entry in usable if entry.in_module(mutant.file)] or importing
    return sorted(found, key=lambda entry: (entry.slow, _cost(entry, mutant.file), entry.file))


def _cost(entry: Mapped, module: str) -> float:
    """Seconds, by the share of what the file reaches that lies in the module."""
    return entry.seconds * entry.breadth / max(entry.in_module(module), 1)


def try_mutant(workspace: Workspace, mutant: Mutant, *, mapped: list[Mapped], budget_s: float) -> dict[str, Any]:
    """Run the tests that reach the mutant until one notices it, or the budget is spent."""
    began = time.monotonic()
    files = covering(mutant, mapped)
    answer: dict[str, Any] = {"outcome": "survived" if files else "uncovered", "by": "", "why": ""}
    num_run = 0
    with workspace.changed(mutant.file, mutant.applied):
        while num_run < len(files) and (left_s := budget_s - (time.monotonic() - began)) > 0:
            batch = _batch(files[num_run:], left_s if num_run else START_S)
            run = workspace.run([entry.file for entry in batch], slow=batch[0].slow, limit_s=4 * _seconds(batch) + 60)
            num_run += len(batch)
            if run.status in ("failed", "timeout"):
                answer |= {"outcome": "killed", "by": run.failed, "why": run.why}
                break
    return {**answer, "files": len(files), "files_run": num_run, "seconds": round(time.monotonic() - began, 1)}


def _batch(files: list[Mapped], limit_s: float) -> list[Mapped]:
    """The first file, and those after it that fit with it into one run of pytest: importing torch takes long."""
    batch = files[:1]
    for entry in files[1:]:
        if entry.slow != batch[0].slow or _seconds([*batch, entry]) > min(limit_s, BATCH_S):
            break
        batch.append(entry)
    return batch


def _seconds(files: list[Mapped]) -> float:
    return START_S + sum(entry.seconds - START_S for entry in files)


def run_mutants(seed: int, count: int, *, out: Path, jobs: int, budget_s: float) -> None:
    """Try the mutants of a draw that `out` does not hold yet, and add a line for each."""
    drawn = draw(ROOT / PACKAGE, seed, count)
    described = [describe(seed, index, mutant) for index, mutant in enumerate(drawn)]
    done = {line["index"]: line for line in read_lines(out)}
    for index, line in done.items():
        if index >= len(described) or any(line[name] != value for name, value in described[index].items()):
            sys.exit(f"{out} holds mutants of another draw or another tree, first {line['file']}:{line['line']}")
    mapped = [entry for slow in (False, True) for entry in read_map(slow=slow).values()]
    if not mapped:
        sys.exit("there is no map yet: python -m benchmarks.mutation map")
    todo = [index for index in range(len(drawn)) if index not in done]
    out.parent.mkdir(parents=True, exist_ok=True)

    def work(workspace: Workspace, index: int) -> dict[str, Any]:
        return try_mutant(workspace, drawn[index], mapped=mapped, budget_s=budget_s)

    for index, answer in on_workspaces(todo, work, jobs=jobs):
        line = {**described[index], **answer}
        with open(out, "a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{show(line)}\n    {line['outcome']} in {line['seconds']} s {line['by']}", flush=True)


def describe(seed: int, index: int, mutant: Mutant) -> dict[str, Any]:
    """What a line of results says about a mutant."""
    names = ("package", "file", "line", "operator", "before", "after")
    return {"seed": seed, "index": index, **{name: getattr(mutant, name) for name in names}}


def show(line: dict[str, Any]) -> str:
    """A mutant in three lines."""
    place = f"{PACKAGE}/{line['file']}:{line['line']}"
    return f"{line['index']:>3} {place} ({line['operator']})\n    - {line['before']}\n    + {line['after']}"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file, which need not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def report(out: Path, equivalent: Path | None) -> None:
    """Print a table of the packages, then the mutants that no test noticed."""
    lines = sorted(read_lines(out), key=lambda line: line["index"])
    reasons: dict[int, str] = {}
    for text in equivalent.read_text().splitlines() if equivalent else []:
        index, _, reason = text.strip().partition(" ")
        if index.isdigit():
            reasons[int(index)] = reason
    for line in lines:
        if line["index"] in reasons and line["outcome"] != "killed":
            line["outcome"] = "equivalent"
    columns = ("drawn", "killed", "survived", "uncovered", "equivalent")
    counts = Counter((line["package"], column) for line in lines for column in ("drawn", line["outcome"]))
    print(f"{'package':<16}" + "".join(f"{column:>12}" for column in columns))
    for package in sorted({line["package"] for line in lines}):
        print(f"{package:<16}" + "".join(f"{counts[package, column]:>12}" for column in columns))
    totals = Counter(line["outcome"] for line in lines) + Counter(drawn=len(lines))
    print(f"{'all':<16}" + "".join(f"{totals[column]:>12}" for column in columns))
    judged = totals["drawn"] - totals["equivalent"]
    print(f"\nkilled: {totals['killed']} of {judged}, {100 * totals['killed'] / max(judged, 1):.1f} %")
    for outcome in ("survived", "uncovered", "equivalent"):
        for line in (line for line in lines if line["outcome"] == outcome):
            left = line["files"] - line["files_run"]
            note = reasons.get(line["index"], "") or (f"{left} files not run, over the budget" if left else "")
            print(f"\n{outcome}{': ' + note if note else ''}\n{show(line)}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add = partial(commands.add_parser, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    mapping, drawing, running, reporting = add("map"), add("draw"), add("run"), add("report")
    mapping.add_argument("--slow", action="store_true", help="the tests marked slow, instead of the others")
    mapping.add_argument("--only", default="", help="files with this in their path")
    mapping.add_argument("--retry", action="store_true", help="try files again that failed or took too long")
    for command in (drawing, running):
        command.add_argument("--seed", type=int, required=True)
        command.add_argument("--count", type=int, required=True)
    running.add_argument("--jobs", type=int, default=2, help="mutants at once")
    for command in (running, reporting):
        command.add_argument("--out", type=Path, required=True, help="the results, one JSON line a mutant")
    running.add_argument(
        "--budget", type=float, default=900.0, help="seconds for a mutant, after which it has survived"
    )
    reporting.add_argument("--equivalent", type=Path, help="mutants to leave out: lines of `index reason`")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    match options.command:
        case "map":
            build_map(slow=options.slow, only=options.only, retry=options.retry)
        case "draw":
            for index, mutant in enumerate(draw(ROOT / PACKAGE, options.seed, options.count)):
                print(show(describe(options.seed, index, mutant)))
        case "run":
            run_mutants(options.seed, options.count, out=options.out, jobs=options.jobs, budget_s=options.budget)
        case "report":
            report(options.out, options.equivalent)


if __name__ == "__main__":
    main()
