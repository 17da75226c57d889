"""A pytest plugin: says which test file runs now, for `mutation_tracing.py`, and how long each took."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.mutation_tracing import VARIABLE, now_file

FOLDER = Path(os.environ[VARIABLE])
_NUMBERS = {file: number for number, file in enumerate((FOLDER / "files").read_text().splitlines())}
_seconds: Counter[str] = Counter()
_tests: Counter[str] = Counter()
_failed: dict[str, str] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str, location: object) -> None:
    """On the process that runs the test: tell it, and all that it started."""
    with open(now_file(str(FOLDER)), "r+b") as file:
        file.write(b"%08d" % _NUMBERS[nodeid.partition("::")[0]])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """On the controlling process: add up."""
    file = report.nodeid.partition("::")[0]
    _seconds[file] += report.duration
    _tests[file] += report.when == "call"
    if report.failed:
        _failed.setdefault(file, report.nodeid)


def pytest_sessionfinish() -> None:
    """The controlling process leaves what it knows."""
    if not os.environ.get("PYTEST_XDIST_WORKER"):
        known = {file: [_seconds[file], _tests[file], _failed.get(file, "")] for file in _seconds}
        (FOLDER / "known.json").write_text(json.dumps(known))
