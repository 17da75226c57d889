"""The script with planted mistakes and the one the skill gives: lint tells them apart, and the second is right."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from shardwise.launching import start_local
from shardwise.linting import lint

pytestmark = pytest.mark.usefixtures("fork_server")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/agent_skill"
MAIN = "examples.agent_skill.after:main"


def planted() -> set[tuple[int, str]]:
    lines = enumerate((FOLDER / "before.py").read_text().splitlines(), 1)
    return {(number, match[1]) for number, line in lines if (match := re.search(r"# planted: (SW\d+)$", line))}


def test_lint_finds_every_planted_mistake_and_nothing_else():
    assert {(finding.line, finding.code) for finding in lint(FOLDER / "before.py")} == planted()
    assert len(planted()) == 12


def test_lint_finds_nothing_in_the_script_that_the_skill_gives():
    assert [str(finding) for finding in lint(FOLDER / "after.py", preview=True)] == []


def test_the_readme_explains_every_planted_mistake():
    assert set(re.findall(r"^\| \[?(SW\d+)", (FOLDER / "README.md").read_text(), re.MULTILINE)) == {
        code for _, code in planted()
    }


def test_model_and_data_are_the_same_in_both():
    """What the skill changes is how the model is trained."""
    parts = [
        (FOLDER / name).read_text().split("class Sums")[1].split("\n\n\ndef ")[0] for name in ("before.py", "after.py")
    ]
    assert parts[0] == parts[1]


def test_two_ranks_train_as_one_process_does(tmp_path: Path):
    whole = start_local(MAIN, 1, (6, str(tmp_path / "one")))[0]
    first, second = start_local(MAIN, 2, (6, str(tmp_path / "two")))
    assert first == second, "the loss is that of all tokens"
    torch.testing.assert_close(torch.tensor(first), torch.tensor(whole), rtol=2e-6, atol=0)
    assert whole[-1] < 0.8 * whole[0]
    states = [weights(tmp_path / name, 6) for name in ("one", "two")]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def weights(folder: Path, num_steps: int) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted((folder / f"weights-{num_steps}").glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.slow
def test_killed_and_resumed_equals_never_stopped(tmp_path: Path):
    """By the command in its header, killed between two checkpoints: the same losses and weights, bit for bit."""
    never = run(tmp_path / "never")
    killed = run(tmp_path / "killed", kill_at=12)
    assert 12 in killed, "it was killed too early"
    resumed = run(tmp_path / "killed")
    assert min(resumed) in (5, 10), "it went on from a checkpoint"
    assert max(never) == max(resumed) == 19
    assert {**killed, **resumed} == never
    assert all(killed[step] == resumed[step] for step in killed.keys() & resumed.keys())
    expected, actual = weights(tmp_path / "never", 20), weights(tmp_path / "killed", 20)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def run(folder: Path, kill_at: int | None = None) -> dict[int, str]:
    """The losses that rank 0 printed, by step; all ranks are killed once it has printed the loss of `kill_at`."""
    script = [str(FOLDER / "after.py"), "--steps", "20", "--folder", str(folder)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script]
    losses: dict[int, str] = {}
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if match := re.match(r"step +(\d+) loss (\S+)", line):
                losses[int(match[1])] = match[2]
                if int(match[1]) == kill_at:
                    break
    finally:
        if kill_at is not None:
            launcher = psutil.Process(process.pid)
            for one in (*launcher.children(recursive=True), launcher):
                one.kill()
        process.stdout.close()
        process.wait(timeout=60)
    return losses
