"""Whole scripts with planted mistakes: lint finds each of them, at its line, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwise.linting.files import LintSettings
from shardwise.linting.lint import lint_text
from shardwise.linting.registry import all_rules

SCRIPTS = sorted((Path(__file__).parent / "wrong").rglob("*.py"))
"""Whole scripts, and in `variants` a few lines each: the same mistakes as others spell them."""
_EXPECTED = re.compile(r"#\s*expect:\s*(.*)$")


def planted_in(text: str) -> set[tuple[int, str]]:
    return {
        (number, code)
        for number, line in enumerate(text.splitlines(), 1)
        if (match := _EXPECTED.search(line))
        for code in re.findall(r"SW\d+", match[1])
    }


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_lint_finds_exactly_what_was_planted(script: Path):
    text = script.read_text()
    findings = lint_text(text, str(script), LintSettings()).findings
    assert {(finding.line, finding.code) for finding in findings} == planted_in(text)
    assert all(finding.fix for finding in findings), "every finding says what to do"


def test_every_rule_that_is_on_by_default_has_a_planted_mistake():
    planted = {code for script in SCRIPTS for _, code in planted_in(script.read_text())}
    assert planted == {code for code, rule in all_rules().items() if not rule.preview}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_noqa_silences_each_planted_mistake(script: Path):
    text = re.sub(r"# expect: (SW[\d, SW]+)", r"# noqa: \1", script.read_text())
    assert lint_text(text, str(script), LintSettings()).findings == ()
