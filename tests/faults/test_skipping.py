"""A plain `shard`: ranks that run other modules than the rest are named on all ranks, before a wrong update."""

import json
import subprocess
import sys

import pytest

TOWER = "in the forward of `vision.blocks.0`, rank {odd} in the forward of `language.blocks.0`"
EXPECTED = {"tower": TOWER, "order": TOWER, "unstepped": "in the optimizer step, rank {odd} in the forward of `embed`"}


def run_skipping(case: str, num_ranks: int, num_machines: int = 1) -> list[dict]:
    command = [sys.executable, "-m", "tests.faults.skipping", case, str(num_ranks), str(num_machines)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    outcomes = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(outcomes) == num_ranks, result.stderr
    return outcomes


@pytest.mark.parametrize(
    ("num_ranks", "num_machines"),
    [(2, 1), pytest.param(4, 1, marks=pytest.mark.slow), pytest.param(2, 2, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "tower" else [pytest.mark.slow]) for case in sorted(EXPECTED)]
)
def test_ranks_that_diverge_raise_before_the_update(case: str, num_ranks: int, num_machines: int):
    for outcome in run_skipping(case, num_ranks, num_machines):
        assert EXPECTED[case].format(odd=num_ranks - 1) in outcome["outcome"]
        assert "ranks diverge at step 2" in outcome["outcome"]
        assert outcome["updates"] == 1
        if case == "tower":
            assert "guard(model, repair=['vision'])" in outcome["outcome"]


@pytest.mark.parametrize("case", ["repaired", pytest.param("none", marks=pytest.mark.slow)])
def test_the_fix_that_the_error_names_works(case: str):
    assert {(outcome["outcome"], outcome["updates"]) for outcome in run_skipping(case, 2)} == {("ended", 3)}
