"""guard(): each way in which a rank can leave the others is named, by rank, module and step, within seconds."""

import json
import subprocess
import sys
from typing import Any

import pytest

WAITS_AND_SAYS = {"early-exit", "slow"}
EXPECTED = {
    "skipped-tower": "rank {odd} did not run `vision` at step 3",
    "branch": "rank {odd} did not run `left` at step 3",
    "expert": "rank {odd} brought other gradients or shapes of `experts` than the rest at step 3",
    "uneven-evaluation": "rank {odd} ended an evaluation, or began one, without the others at step 3",
    "killed": "rank {odd} died in step 3",
    "early-exit": "rank {odd} has left the training loop after 2 steps; rank 0 goes on",
    "slow": "rank {odd} has not come to what rank 0 waits for",
}


def run_diverging(case: str, num_ranks: int) -> dict[int, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.faults.diverging", case, str(num_ranks)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    outcomes = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert outcomes, result.stderr
    return {outcome["rank"]: outcome for outcome in outcomes}


# A few seconds each: three kinds of divergence always run, the others and four ranks in the long suite.
QUICK = {"skipped-tower", "killed", "expert"}
CASES = [pytest.param(case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in sorted(EXPECTED)]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_diverges_is_named(case: str, num_ranks: int):
    outcomes = run_diverging(case, num_ranks)
    expected = EXPECTED[case].format(odd=num_ranks - 1)
    first = outcomes[0]
    told = "\n".join(first["said"]) if case in WAITS_AND_SAYS else first["outcome"]
    assert expected in told
    if case == "slow":
        assert "time.sleep(5)" in told, "its stack is shown"
        assert {outcome["outcome"] for outcome in outcomes.values()} == {"ended"}, "late is not wrong"
    elif case not in {"killed", "early-exit"}:
        assert expected in outcomes[num_ranks - 1]["outcome"], "the rank itself raises before it starts the collective"
        assert first["seconds"] < 15


def test_ranks_that_agree_are_left_alone():
    outcomes = run_diverging("none", 2)
    assert {outcome["outcome"] for outcome in outcomes.values()} == {"ended"}
    assert [outcome["said"] for outcome in outcomes.values()] == [[], []]
