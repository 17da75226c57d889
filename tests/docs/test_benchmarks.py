"""The benchmarks run at toy size, and what they count is right. Times are never asserted."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from statistics import median

import pytest
import torch

from benchmarks.measuring import Pairs, median_interval, slowest, watch_memory
from benchmarks.reporting import percent
from benchmarks.tabulate import PAGE, filled, newest
from benchmarks.test_times import times_by_file
from tests.docs.test_snippets import ROOT

FIELDS = {
    "case",
    "value",
    "unit",
    "baseline",
    "ratio",
    "goal",
    "met",
    "versions",
    "date",
    "command",
    "machine",
}


def run_toy(name: str, *options: str) -> list[dict]:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--toy", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_step_does_the_same_as_by_hand():
    lines = run_toy("step")
    assert all(line.keys() >= FIELDS for line in lines)
    equal = [line for line in lines if line["goal"] == "equal"]
    assert len(equal) == 6
    assert all(line["met"] and line["value"] == line["baseline"] for line in equal)
    memory = [line for line in lines if "peak memory" in line["case"]]
    assert all(line["met"] for line in memory), memory


@pytest.mark.slow
def test_step_runs_as_one_of_many_that_do_not_exist():
    assert len(run_toy("step", "--fake", "4", "--models", "llama")) == 6


@pytest.mark.slow
def test_rows_of_the_gpu_run_without_one():
    lines = run_toy("gpu", "moe", "moe-looped")
    assert [line["case"].split(":")[0] for line in lines] == ["gpu/moe", "gpu/moe-looped"]
    assert all(line.keys() >= FIELDS and line["value"] > 0 for line in lines)


@pytest.mark.slow
def test_data_runs():
    lines = run_toy("data")
    assert all(line.keys() >= FIELDS for line in lines)
    assert sum("data-bound" in line["case"] for line in lines) == 2


@pytest.mark.slow
def test_planning_runs():
    lines = run_toy("planning")
    assert all(line.keys() >= FIELDS for line in lines)
    by_case = {line["case"].rpartition(": ")[2]: line for line in lines}
    assert by_case["tensor bytes kept by plan + shard on meta"]["value"] == 0
    assert by_case["tensor bytes kept by materialize"]["met"]
    assert by_case["states and buffers of a rank, against dim 0"]["ratio"] < 0.2


@pytest.mark.slow
def test_clip_runs():
    time, norm = run_toy("clip")
    assert time.keys() >= FIELDS
    assert norm["met"]


@pytest.mark.slow
def test_training_loop_learns_what_the_hand_written_one_does():
    results = run_toy("train_overhead")
    assert all(result.keys() >= FIELDS for result in results)
    (loss,) = [result for result in results if result["case"].endswith(": first loss")]
    assert loss["met"]


@pytest.mark.slow
def test_soak_runs():
    time, cpu, memory = run_toy("train_overhead", "--soak", "40")
    assert all(len(result["details"]["by_tenth_ms"]) == 10 for result in (time, cpu))
    assert len(memory["details"]["by_tenth_bytes"]) == 10


def test_results_that_are_kept_are_whole():
    for file in sorted((ROOT / "benchmarks/results").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            assert json.loads(line).keys() >= FIELDS, file.name
            assert "--toy" not in json.loads(line)["command"], "a toy's numbers mean nothing"


def test_page_of_measurements_shows_the_newest_results():
    page = PAGE.read_text()
    assert page == filled(page, newest()), "python -m benchmarks.tabulate"


def test_readme_shows_the_newest_results():
    measured = {f"{result['value']:,.0f}": result["details"] for result in newest() if result["unit"] == "tokens/s"}
    rows = re.findall(r"^\| .* GiB \|.*\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) == 7
    for row in rows:
        _, tokens, rate, mfu, causal, ceiling, memory, peer = (cell.strip() for cell in row.strip("|").split("|"))
        details = measured[rate]
        assert tokens == f"{details['batch']} x {details['length']:,}"
        assert (mfu, causal) == (percent(details["mfu"]), percent(details["causal_mfu"]))
        assert ceiling == f"{details['percent_of_ceiling']} %"
        assert memory == f"{int(details['allocated_gib'] + 0.5)} GiB"
        if peer:
            theirs, ratio = float(peer.split()[0].strip(":").replace(",", "")), float(peer.split()[-1].strip("x"))
            assert ratio == round(float(rate.replace(",", "")) / theirs, 2)


@pytest.mark.parametrize(("count", "low", "high"), [(3, 0, 2), (6, 0, 5), (10, 1, 8), (20, 5, 14)])
def test_interval_is_the_binomial_one(count: int, low: int, high: int):
    """Order statistics of the usual tables, for 95 %."""
    values = list(range(count))
    random.Random(0).shuffle(values)
    assert median_interval(values) == (low, high)


def test_interval_holds_the_true_median_as_often_as_it_says():
    draw = random.Random(0)
    inside = 0
    for _ in range(1000):
        low, high = median_interval([draw.gauss(0, 1) for _ in range(20)])
        inside += low <= 0 <= high
    assert inside >= 940


def test_a_stretch_lasts_as_long_as_on_its_slowest_rank():
    assert slowest([Pairs((1.0, 4.0), (3.0, 1.0)), Pairs((2.0, 3.0), (2.0, 2.0))]) == Pairs((2.0, 4.0), (3.0, 2.0))
    assert median(Pairs((1.0, 2.0, 4.0), (2.0, 2.0, 2.0)).ratios) == 1.0


def test_memory_is_followed_in_the_allocator():
    kept: list[torch.Tensor] = []

    def work() -> None:
        kept.append(torch.empty(1000, dtype=torch.uint8))
        torch.empty(5000, dtype=torch.uint8)
        torch.empty(0).untyped_storage().resize_(3000)  # as FSDP2 does, past any operator

    memory = watch_memory(work)
    assert (memory.kept, memory.peak) == (1000, 6000)


def test_times_are_summed_by_file():
    xml = (
        '<testsuites><testsuite tests="3" failures="1" time="5.0" timestamp="2026-01-02T03:04:05.6">'
        '<testcase classname="tests.unit.test_a" name="test_x" time="1.5"/>'
        '<testcase classname="tests.test_b.TestMore" name="test_y" time="4.25"/>'
        '<testcase classname="tests.unit.test_a" name="test_x[1]@group" time="0.5"><failure/></testcase>'
        "</testsuite></testsuites>"
    )
    by_file, head = times_by_file(xml)
    assert list(by_file.items()) == [("tests/test_b.py", [4.25]), ("tests/unit/test_a.py", [1.5, 0.5])]
    assert head == "3 tests, 1 failures; 5 s from start to end, 6 s of tests; 2026-01-02T03:04:05"
