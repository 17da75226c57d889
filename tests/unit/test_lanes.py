"""Lanes: a file of rank tests stays in one. Limits: a test that never ends fails by its name, and the next ones run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENDLESS = """
import threading


def test_endless_loop():
    while True:
        pass


def test_waits_for_ever():
    threading.Event().wait()


def test_after_them():
    pass
"""
STUCK = """
import itertools


def test_stuck_in_c():
    all(itertools.repeat(True, 10**10))  # looks at no signal for minutes


def test_after_it():
    pass
"""

MANY = """
import pytest


@pytest.mark.parametrize("number", range(8))
def test_number(number):
    pass
"""


def run_pytest(folder: Path, source: str, *options: str) -> str:
    """What pytest prints for a file of tests, with the settings of this repository and one worker."""
    (folder / "test_these.py").write_text(source)
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "-p", "tests.lanes"]
    command = [sys.executable, "-m", "pytest", *settings, "-p", "no:cacheprovider", "-v", "-n", "1", *options]
    command.append("test_these.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=90, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize(("line", "num_lanes"), [("from tests.ranks import ranks", 1), ("", 2)], ids=["ranks", "none"])
def test_file_of_rank_tests_stays_in_one_lane(tmp_path: Path, line: str, num_lanes: int):
    printed = run_pytest(tmp_path, f'"""{line}"""{MANY}', "-n", "2", "--dist", "loadgroup")
    lanes = re.findall(r"\[(gw\d)\] \[ *\d+%\] PASSED", printed)
    assert (len(lanes), len(set(lanes))) == (8, num_lanes), printed


def test_endless_test_fails_by_name_and_the_next_one_runs(tmp_path: Path):
    printed = run_pytest(tmp_path, ENDLESS, "-o", "timeout=1")
    assert "FAILED test_these.py::test_endless_loop - Failed: Timeout (>1.0s)" in printed
    assert "FAILED test_these.py::test_waits_for_ever - Failed: Timeout (>1.0s)" in printed
    assert re.search(r"\n> +(while True:|pass)\n", printed), "where it was"
    assert re.search(r"\n> +threading.Event\(\).wait\(\)\n", printed), "where it was"
    assert "PASSED test_these.py::test_after_them" in printed
    assert "crashed" not in printed, "the worker continues"


@pytest.mark.slow
def test_test_that_no_signal_reaches_ends_its_worker_and_the_next_one_runs(tmp_path: Path):
    printed = run_pytest(tmp_path, STUCK, "-o", "timeout=1", "-o", "timeout_grace=1")
    assert "worker 'gw0' crashed while running 'test_these.py::test_stuck_in_c'" in printed
    assert "in test_stuck_in_c" in printed, "its stack"
    assert "PASSED test_these.py::test_after_it" in printed
