"""`shardwise lint`: exit status, formats, fixes, standard input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

WRONG = "from torch.distributed.fsdp import fully_shard\nmodel = build()\nfully_shard(model)\nmodel.forward(x)\n"
RIGHT = WRONG.replace("model.forward(x)", "model(x)")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "right.py").write_text(RIGHT)
    return tmp_path


def shardwise(folder: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "shardwise.cli.main", "lint", *arguments]
    done = subprocess.run(command, cwd=folder, input=stdin, capture_output=True, text=True, timeout=120, check=False)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "torch" not in imported, "lint must not import torch"
    done.stderr = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("import time:"))
    return done


def test_findings_exit_1_and_none_exit_0(folder: Path):
    done = shardwise(folder, "wrong.py")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "wrong.py:4:1 SW229 forward() does not run FSDP's hooks; the parameters stay sharded",
        "  4 | model.forward(x)",
        "    | ^^^^^^^^^^^^^^^^",
        "  fix:  call the model itself [safe]",
        "1 found in 1 file(s); --fix repairs 1",
    ]
    done = shardwise(folder, "right.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "nothing found\n", "")


def test_wrong_input_exits_2_with_an_error(folder: Path):
    done = shardwise(folder, "absent.py")
    assert done.returncode == 2
    assert "no such file or folder: absent.py" in done.stderr
    done = shardwise(folder, ".", "--select", "SW999")
    assert done.returncode == 2
    assert "no rule has the code SW999" in done.stderr


def test_fix_repairs_the_file_and_exits_0_when_nothing_is_left(folder: Path):
    done = shardwise(folder, "--fix", ".")
    assert (done.returncode, done.stdout) == (0, "1 fixed\nnothing found\n")
    assert (folder / "wrong.py").read_text() == RIGHT


def test_standard_input_is_linted_or_fixed(folder: Path):
    done = shardwise(folder, "-", "--format", "json", stdin=WRONG)
    assert done.returncode == 1
    assert [(one["path"], one["line"]) for one in json.loads(done.stdout)["findings"]] == [("-", 4)]
    done = shardwise(folder, "-", "--fix", stdin=WRONG)
    assert (done.returncode, done.stdout) == (0, RIGHT)
    done = shardwise(folder, "-", "--unsafe-fixes", stdin="print(1)\n")
    assert (done.returncode, done.stdout) == (0, "print(1)\n")


@pytest.mark.parametrize("format", ["json", "sarif", "github"])
def test_machine_formats_hold_the_finding_and_the_status(folder: Path, format: str):
    done = shardwise(folder, ".", "--format", format)
    assert done.returncode == 1
    assert "SW229" in done.stdout
    if format != "github":
        json.loads(done.stdout)
    empty = shardwise(folder, "right.py", "--format", format)
    assert empty.returncode == 0
    if format == "github":
        assert empty.stdout == ""
