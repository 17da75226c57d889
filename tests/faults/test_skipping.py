"""A plain `shard`: ranks that run other modules than the rest are named on all ranks, before a wrong update."""

import json
import subprocess
import sys

import pytest

TOWER = "in the forward of `vision.blocks.0`, rank {odd} in the forward of `language.blocks.0`"
BLOCK = "rank 0 in the forward of `blocks.0` of {}, rank 1 in the forward of `blocks.0` of {}"
EXPECTED = {"tower": TOWER, "order": TOWER, "unstepped": "in the optimizer step, rank {odd} in the forward of `embed`"}
SEVERAL_MODELS = {  # with the number of updates before
    "gan": (BLOCK.format("Tower #2", "Tower"), 3),
    "gan_dict": ("rank 0 in the forward of `generator.blocks.0`, rank 1 in the forward of `critic.blocks.0`", 3),
    "gan_unstepped": ("optimizer step of `critic.blocks`, rank 1 in the optimizer step of `generator.blocks`", 2),
    "three": (BLOCK.format("Tower #2", "Tower #3"), 4),
    "teacher": (BLOCK.format("Tower", "Tower #2"), 1),
}


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


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "gan" else [pytest.mark.slow]) for case in SEVERAL_MODELS]
)
def test_models_of_the_same_ranks_have_one_order(case: str):
    places, updates = SEVERAL_MODELS[case]
    for outcome in run_skipping(case, 2):
        assert places in outcome["outcome"]
        assert "tests/faults/skipping.py" in outcome["outcome"]
        assert outcome["updates"] == updates


@pytest.mark.parametrize("case", ["repaired", pytest.param("none", marks=pytest.mark.slow)])
def test_the_fix_that_the_error_names_works(case: str):
    assert {(outcome["outcome"], outcome["updates"]) for outcome in run_skipping(case, 2)} == {("ended", 3)}
