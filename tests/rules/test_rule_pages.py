"""Each lint rule's page is its test: right code first, then wrong code with its lines marked, then the fix."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwise.findings import Safety
from shardwise.linting.files import LintSettings
from shardwise.linting.lint import lint_text
from shardwise.linting.registry import all_rules

PAGES = Path(__file__).parents[2] / "docs" / "rules"
RULES = all_rules()
_BLOCK = re.compile(r"^```python (good|bad|before|after|unchanged)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"#\s+((?:SW\d+[,\s]*)+)$")
_EVERYTHING = LintSettings(preview=True)


def blocks_of(code: str, *kinds: str) -> list[str]:
    found = _BLOCK.findall((PAGES / f"{code}.md").read_text())
    return [text for kind, text in found if kind in kinds]


def marks_in(text: str) -> set[tuple[int, str]]:
    lines = enumerate(text.splitlines(), 1)
    return {
        (number, code) for number, line in lines if (m := _MARK.search(line)) for code in re.findall(r"SW\d+", m[1])
    }


def found_in(text: str) -> set[tuple[int, str]]:
    return {(finding.line, finding.code) for finding in lint_text(text, "page.py", _EVERYTHING).findings}


@pytest.mark.parametrize("code", RULES)
def test_right_code_on_the_page_has_no_finding_of_this_rule(code: str):
    good = blocks_of(code, "good", "after", "unchanged")
    assert good, "the page shows no right code"
    for text in good:
        assert code not in {found for _, found in found_in(text)}, text


@pytest.mark.parametrize("code", RULES)
def test_wrong_code_on_the_page_is_found_at_the_marked_lines(code: str):
    bad = blocks_of(code, "bad")
    assert bad, "the page shows no wrong code"
    for text in bad:
        expected = marks_in(text)
        assert code in {found for _, found in expected}
        of_this_rule = {(line, found) for line, found in found_in(text) if found in {c for _, c in expected}}
        assert of_this_rule == expected, text


@pytest.mark.parametrize("code", [code for code, rule in RULES.items() if rule.safety is not Safety.MANUAL])
def test_fix_on_the_page_gives_the_code_after_it_and_a_second_pass_changes_nothing(code: str):
    pairs = list(zip(blocks_of(code, "before"), blocks_of(code, "after"), strict=True))
    assert pairs, "the page shows no fix"
    only = LintSettings(select=(code,))
    for before, after in pairs:
        fixed = lint_text(before, "page.py", only, fixes=frozenset({RULES[code].safety}))
        assert fixed.text == after
        assert fixed.num_fixed > 0
        again = lint_text(after, "page.py", only, fixes=frozenset({RULES[code].safety}))
        assert (again.text, again.num_fixed) == (after, 0)


@pytest.mark.parametrize("code", RULES)
def test_page_names_the_rule_its_severity_and_its_fix(code: str):
    text, rule = (PAGES / f"{code}.md").read_text(), RULES[code]
    assert text.startswith(f"# {code} {rule.name}\n\n{' '.join(rule.summary.split())}"[:60])
    assert f"Severity: {rule.severity.value}. Fix: {rule.safety.value}." in text
    assert "`--preview`" in text or not rule.preview


def test_every_page_of_a_lint_rule_belongs_to_a_rule():
    ours = {page.stem for page in PAGES.glob("SW*.md") if page.stem >= "SW190"}
    assert ours == set(RULES) | {"SW200"}


def test_the_guide_lists_every_rule():
    listed = re.findall(
        r"^\| \[(SW\d+)\]\(rules/(\S+)\.md\) \| (\S+)", (PAGES.parent / "lint.md").read_text(), re.MULTILINE
    )
    expected = [(code, code, rule.name) for code, rule in RULES.items()] + [("SW200", "SW200", "unreadable-source")]
    assert listed == sorted(expected)
