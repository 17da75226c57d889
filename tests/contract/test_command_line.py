"""Commands, options and defaults; exit statuses of real invocations, in this process and in their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.command_line import ROOT, describe_command_line, run
from tests.contract.drift import check
from tests.contract.outputs import WRONG, describe_statuses
from tests.contract.record import Subject


def test_commands_are_as_recorded():
    check("command line", describe_command_line())


def test_exit_statuses_are_as_recorded(subject: Subject):
    check("exit statuses", describe_statuses(subject.work("statuses")))


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["lint", "wrong.py", "--format", "json"], 1), (["explain", "SW502"], 0), (["lint", "absent.py"], 2)],
    ids=["lint", "explain", "wrong-input"],
)
def test_a_process_of_its_own_prints_and_ends_the_same(tmp_path: Path, arguments: list[str], status: int):
    (tmp_path / "wrong.py").write_text(WRONG)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "shardwise", *arguments]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    here = run(*arguments, folder=tmp_path)
    assert (process.returncode, process.stdout, process.stderr) == (here.status, here.output, here.errors)
    assert here.status == status
