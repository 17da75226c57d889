"""The command line as a user meets it: output, exit status, and nothing printed twice."""

import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from shardwise.config.load import load
from shardwise.config.run import RunConfig

SMALL = {"width": 32, "num_layers": 2, "num_heads": 2}
TINY = [
    "--set", "model=tutorial", "--set", f"model_options={json.dumps(SMALL)}", "--set", "training.steps=8",
    "--set", "training.batch_size=8", "--set", "data.sequence_length=32", "--set", "training.sample_tokens=8",
]  # fmt: skip


def shardwise(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwise.cli.main", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=180)


def test_help_is_quick():
    shardwise("--help")  # once, so that the files are in memory
    seconds = []
    for _ in range(5):
        start = cpu_of_children_s()
        assert shardwise("--help").returncode == 0
        seconds.append(cpu_of_children_s() - start)
    assert min(seconds) <= 0.5


def cpu_of_children_s() -> float:
    """CPU time, which a second lane of tests does not lengthen as it does wall time."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_version_is_printed():
    result = shardwise("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("shardwise 0.")


def test_unknown_option_is_wrong_input():
    assert shardwise("train", "--bogus").returncode == 2


def test_config_problem_is_printed_once_as_rows():
    result = shardwise("train", "--set", "mesh.shrad=2", "--set", "training.steps=x")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: 2 problems in the config\n  where: ")
    assert result.stderr.count("did you mean 'shard'?") == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "command",
    [["--print-config", "--nproc", "1"], pytest.param(["--nproc", "1"], marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_tensor_axis_wider_than_the_ranks_is_wrong_input(command: list[str], tmp_path: Path):
    result = shardwise("train", *TINY, "--set", "mesh.tensor=2", *command, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error: a shard 1 x tensor 2 mesh needs 2 ranks, got 1"), result.stderr
    assert "fix:   start 2 ranks" in result.stderr
    assert not list(tmp_path.rglob("*.*"))


def test_printed_config_is_the_run_with_reasons(tmp_path: Path):
    result = shardwise("train", "--print-config", "--set", "training.steps=5", "--nproc", "2", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    default = RunConfig()
    expected = replace(default, training=replace(default.training, steps=5), folder="runs/llama3-bytes-1")
    assert load(RunConfig, yaml.safe_load(result.stdout)) == expected
    rows = default.training.batch_size // 2
    for reason in (
        r"^# [\d.]+[kM] parameters\nmodel: llama3-bytes\n",
        r"\n# 2 ranks: shard 2\nmesh:\n",
        r"\n# ├─ model.layers.0 … model.layers.\d",
        rf"\n  # {rows} sequences on each of 2 ranks, [\d.]+k tokens a step\n  batch_size: {2 * rows}\n",
        r"\n  # starts from scratch\n  resume: auto\n",
    ):
        assert re.search(reason, result.stdout), reason
    assert list(tmp_path.iterdir()) == [], "printing makes nothing"


def test_printed_config_may_name_a_module_of_the_working_folder(tmp_path: Path):
    (tmp_path / "beside.py").write_text("from torch import nn\nprint('imported')\nbuild = lambda: nn.Linear(4, 4)\n")
    result = shardwise("train", "--print-config", "--set", "model=beside:build", "--nproc", "2", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert yaml.safe_load(result.stdout)["model"] == "beside:build"


@pytest.mark.parametrize("command", [["--print-config"], pytest.param(["--nproc", "2"], marks=pytest.mark.slow)])
def test_a_module_may_lie_beside_the_run_file(tmp_path: Path, command: list[str]):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "beside.py").write_text(
        "from shardwise.models.llama import *\nbuild = lambda: Llama(SHAPES['llama3-bytes'])\n"
    )
    (folder / "run.yaml").write_text("model: beside:build\ntraining: {steps: 1, sample: null}\n")
    result = shardwise("train", "elsewhere/run.yaml", *command, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_error_on_a_rank_is_printed_once_with_its_rank(tmp_path: Path):
    result = shardwise("train", "--nproc", "2", "--set", "mesh.shard=3", cwd=tmp_path)
    assert result.returncode == 2
    assert list(tmp_path.glob("runs/*")) == []
    assert result.stderr.count("a 1 x 3 mesh needs 3 ranks, got 2") == 1
    assert "(raised on rank" in result.stderr
    assert "Traceback" not in result.stderr


def test_unexpected_error_says_how_to_report_it(tmp_path: Path):
    (tmp_path / "broken.py").write_text("def build():\n    raise LookupError('what now')\n")
    result = shardwise("train", "--nproc", "1", "--set", "model=broken:build", cwd=tmp_path)
    assert result.returncode == 70
    assert result.stderr.count("LookupError: what now") == 1
    assert "in build" in result.stderr
    assert "report the lines above" in result.stderr


@pytest.mark.slow
def test_training_learns_reports_and_goes_on(tmp_path: Path):
    """The command that the first run prints resumes it."""
    result = shardwise("train", "--nproc", "2", *TINY, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "training tutorial 8/8  loss " in result.stderr
    first, *rest = result.stdout.splitlines()
    assert first.startswith("trained tutorial (50.")
    assert "checkpoint  runs/tutorial-1/checkpoints/step-00000008" in rest
    assert any(line.startswith("    def ") for line in rest)
    command = rest[-1].split()[2:]
    assert command == ["shardwise", "train", "runs/tutorial-1/config.yaml", "--set", "training.steps=16"]
    again = shardwise(*command[1:], "--nproc", "2", "--format", "json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    training = json.loads(again.stdout)
    assert (training["num_ranks"], training["resumed_step"], training["steps"]) == (2, 8, 16)
    assert training["last_loss"] < training["first_loss"]
    assert training["tokens"] == 8 * 8 * 32


@pytest.mark.slow
def test_parity_of_a_reference_model():
    result = shardwise("parity", "llama3-debug", "--nproc", "2", "--format", "json")
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(result.stdout)["equal"] is True


MADE_IN_INIT = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.full((4,), 0.5))  # no reset_parameters: known only where __init__ runs

    def forward(self, x, y):
        out = self.block(x) * self.scale
        return out, (out - y).square().mean()

def batch(rank, step, seed):
    generator = torch.Generator().manual_seed(rank + 10 * step + 100 * seed)
    return torch.randn(2, 4, generator=generator), torch.randn(2, 4, generator=generator)
"""


@pytest.mark.slow
def test_parity_builds_a_callable_as_it_stands_and_takes_its_loss(tmp_path: Path):
    (tmp_path / "made.py").write_text(MADE_IN_INIT)
    result = shardwise(
        "parity",
        "made:Model",
        "--batch",
        "made:batch",
        "--nproc",
        "2",
        "--steps",
        "1",
        "--format",
        "json",
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["equal"]


def test_parity_of_a_wrong_model_exits_with_one_and_prints_only_the_verdict(tmp_path: Path):
    (tmp_path / "wrong.py").write_text(
        "import os, torch\n"
        "print('imported')\n"
        "class Wrong(torch.nn.Linear):\n"
        "    calls = 0\n"
        "    def forward(self, tokens):\n"
        "        Wrong.calls += 1  # what one process shares between batches must not matter\n"
        "        return super().forward(tokens) * Wrong.calls\n"
        "def build():\n"
        "    os.write(1, b'written\\n')\n"
        "    print('built')\n"
        "    return Wrong(4, 4)\n"
        "def batch(rank, step):\n"
        "    return torch.ones(2, 4) * (rank + step + 1)\n"
    )
    model = ["wrong:build", "--batch", "wrong:batch"]
    result = shardwise("parity", *model, "--nproc", "2", "--format", "json", cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    assert json.loads(result.stdout)["equal"] is False, "standard output is the verdict's alone"
    for printed in ("imported", "written", "built"):
        assert printed in result.stderr  # two ranks print at once: lines may run together
