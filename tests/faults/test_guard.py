"""guard(): each way in which a rank can leave the others is named, by rank, module and step, within seconds."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

Outcomes = dict[int, dict[str, Any]]

WAITS_AND_SAYS = {"early-exit", "slow"}
EXPECTED = {
    "skipped-tower": "in the forward of `vision`, rank {odd} in the forward of `left`",
    "branch": "in the forward of `left`, rank {odd} in the forward of `right`",
    "expert": "rank {odd} reduced gradients of `experts` of other shapes than the rest at step 3",
    "uneven-evaluation": "rank {odd} ended an evaluation, or began one, without the others at step 3",
    "killed": "rank {odd} died in step 3",
    "early-exit": "rank {odd} has left the training loop after 2 steps; rank 0 continues",
    "slow": "rank {odd} has made no progress for",
}


def run_diverging(case: str, num_ranks: int, num_machines: int = 1) -> Outcomes:
    command = [sys.executable, "-m", "tests.faults.diverging", case, str(num_ranks), str(num_machines)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return _outcomes(result.stdout, result.stderr)


def run_with_agents(case: str, num_agents: int, ranks_each: int) -> Outcomes:
    """The same under torchrun, an agent a machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={num_agents}", f"--nproc-per-node={ranks_each}"]
    meet = ["--master-addr=127.0.0.1", f"--master-port={port}", "-m", "tests.faults.diverging", case]
    agents = [
        subprocess.Popen(
            [*launch, f"--node-rank={node}", *meet], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for node in range(num_agents)
    ]
    texts = [agent.communicate(timeout=120) for agent in agents]
    return _outcomes("".join(out for out, _ in texts), "".join(errors for _, errors in texts))


def _outcomes(text: str, errors: str) -> Outcomes:
    outcomes = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert outcomes, errors
    return {outcome["rank"]: outcome for outcome in outcomes}


# A few seconds each: three kinds of divergence always run, the others and more ranks in the long suite.
QUICK = {"skipped-tower", "killed"}
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


@pytest.mark.parametrize(
    ("num_ranks", "num_machines"),
    [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow), pytest.param(3, 3, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "branch" else [pytest.mark.slow]) for case in sorted(EXPECTED)]
)
def test_a_rank_that_diverges_is_named_on_other_machines(case: str, num_ranks: int, num_machines: int):
    """On `branch` nothing hangs and nothing fails by itself: equal sizes are mixed up, and training would continue."""
    outcomes = run_diverging(case, num_ranks, num_machines)
    odd = num_ranks - 1
    expected = EXPECTED[case].format(odd=odd)
    assert_survivors_name(expected.replace("; rank 0 continues", ""), case, outcomes, odd)


def test_a_rank_that_ends_at_once_has_published_its_error():
    """Rank 2 raises because rank 3, on its machine, is dead, and ends: rank 0 must not take rank 2 for the dead one."""
    outcomes = run_diverging("killed-loaded", 4, 2)
    assert sorted(outcomes) == [0, 1, 2]
    assert all("rank 3 died in step 3" in outcome["outcome"] for outcome in outcomes.values()), outcomes


def assert_survivors_name(expected: str, case: str, outcomes: Outcomes, odd: int) -> None:
    """Where sizes differ gloo ends the process that gets more, so that a rank of either side may be gone."""
    survivors = [outcome for rank, outcome in outcomes.items() if rank != odd or case not in {"early-exit", "slow"}]
    assert survivors
    for outcome in survivors:
        if case == "slow":
            assert outcome["outcome"] == "ended"
            assert expected.partition("what rank")[0] in "\n".join(outcome["said"])
            assert "time.sleep(5)" in "\n".join(outcome["said"]), "its stack is shown, from the other machine"
        else:
            assert expected in outcome["outcome"]
        assert outcome["seconds"] < 20


@pytest.mark.slow
@pytest.mark.parametrize("ranks_each", [1, 2])
@pytest.mark.parametrize("case", ["none", "uneven-evaluation"])
def test_machines_started_by_torchrun(case: str, ranks_each: int):
    outcomes = run_with_agents(case, 2, ranks_each)
    odd = 2 * ranks_each - 1
    if case == "none":
        assert {outcome["outcome"] for outcome in outcomes.values()} == {"ended"}
        assert len(outcomes) == 2 * ranks_each
    else:
        assert_survivors_name(EXPECTED[case].format(odd=odd), case, outcomes, odd)


@pytest.mark.parametrize(
    ("num_ranks", "num_machines"),
    [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_ranks_that_agree_are_left_alone(num_ranks: int, num_machines: int):
    outcomes = run_diverging("none", num_ranks, num_machines)
    assert len(outcomes) == num_ranks
    assert {outcome["outcome"] for outcome in outcomes.values()} == {"ended"}
    assert all(outcome["said"] == [] for outcome in outcomes.values())


@pytest.mark.slow
@pytest.mark.parametrize("num_machines", [1, 2])
def test_a_skipped_tower_that_is_repaired_stops_nobody(num_machines: int):
    outcomes = run_diverging("skipped-tower:vision", 2, num_machines)
    assert {outcome["outcome"] for outcome in outcomes.values()} == {"ended"}
    assert all(outcome["said"] == [] for outcome in outcomes.values())


@pytest.mark.slow
def test_what_repair_does_not_name_still_raises():
    outcomes = run_diverging("skipped-tower:left,right", 2)
    expected = "rank 0 in the forward of `vision`, rank 1 in the forward of `experts`"
    assert all(expected in outcome["outcome"] for outcome in outcomes.values())


LEAVING = """
import sys
import torch
import torch.distributed as dist
from shardwise import compat

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
dist.barrier()
if rank == 1:
    sys.stdin.read()
    sys.exit()

def stop():
    raise ValueError("enough")

try:
    compat.wait_in_slices(dist.all_reduce(torch.ones(3), async_op=True), dist.group.WORLD, stop)
except ValueError as error:
    print(error, flush=True)
"""


@pytest.mark.slow
def test_a_rank_that_gave_up_waiting_can_end(tmp_path: Path):
    """Destroying a gloo group waits for its collectives, and the other rank never comes."""
    command = [sys.executable, "-c", LEAVING]
    place = str(tmp_path / "store")
    with subprocess.Popen([*command, "1", place], stdin=subprocess.PIPE) as absent:
        left = subprocess.run([*command, "0", place], capture_output=True, text=True, timeout=100)
        assert absent.poll() is None
        absent.kill()
    assert (left.stdout, left.returncode) == ("enough\n", 0), left.stderr
