"""Nothing is found in code that is right: scripts of our own, and all that this repository ships."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from shardwise.linting import lint, lint_text
from shardwise.rules.settings import LintSettings

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((Path(__file__).parent / "right").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_nothing_is_found_in_scripts_that_are_right(script: Path):
    findings = lint_text(script.read_text(), script.name, LintSettings(preview=True)).findings
    assert [str(finding) for finding in findings] == []


@pytest.mark.parametrize("folder", ["src", "examples", "benchmarks"])
def test_nothing_is_found_in_what_this_repository_ships(folder: str):
    meant = ROOT / "examples/agent_skill/before.py"  # its test says what is found there
    assert [str(finding) for finding in lint(ROOT / folder) if Path(finding.path) != meant] == []


def standard_library(step: int) -> list[Path]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return files[::step]


def read_all(files: list[Path]) -> list[str]:
    """Every rule on every file, also where nothing of FSDP is mentioned."""
    everything = LintSettings(preview=True)
    return [str(one) for file in files for one in lint_text(file.read_text(), str(file), everything).findings]


def test_nothing_is_found_in_some_of_the_standard_library():
    assert read_all(standard_library(step=8)) == []


@pytest.mark.slow
def test_nothing_is_found_in_all_of_the_standard_library():
    assert read_all(standard_library(step=1)) == []
