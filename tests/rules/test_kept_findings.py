"""What lint says of every planted mistake, and makes of it, to the letter but for its prose."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from shardwise.findings import Safety
from shardwise.linting.files import LintSettings
from shardwise.linting.lint import lint_text
from tests.golden import same_as_kept
from tests.rules.test_wrong_scripts import SCRIPTS


def changed(before: str, after: str) -> list[str]:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return [line for line in lines if not line.startswith(("---", "+++"))]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_findings(script: Path):
    text = script.read_text()
    linted = lint_text(text, script.name, LintSettings())
    rows = [
        f"{each.where}-{each.end_line}:{each.end_column} {each.code} {each.name} {each.severity.value} "
        f"{each.safety.value} {each.status.value} {len(each.edits)}"
        for each in linted.findings
    ]
    assert linted.num_fixed == 0
    fixed = lint_text(text, script.name, LintSettings(), fixes=frozenset({Safety.SAFE, Safety.UNSAFE}))
    safe = lint_text(text, script.name, LintSettings(), fixes=frozenset({Safety.SAFE}))
    kept = {
        "findings": rows,
        "num_fixed": [safe.num_fixed, fixed.num_fixed],
        "left": [each.code for each in fixed.findings],
        "safe": changed(text, safe.text),
        "unsafe": changed(safe.text, fixed.text),
    }
    same_as_kept("findings", script.stem, kept)
