"""The pages of the framework rules are their tests: each block is converted, refused or left as the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwise.findings import SourceFinding, Status
from shardwise.fsdp1.codemod.framework_files import convert_yaml, framework_findings
from shardwise.source.edits import apply
from shardwise.source.syntax import FileContext

PAGES = Path(__file__).parents[3] / "docs" / "rules"
_BLOCK = re.compile(r"^```(yaml|python) (before|after|decide)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CODES = ("SW181", "SW182", "SW183", "SW184")
BLOCKS = [(code, *block) for code in CODES for block in _BLOCK.findall((PAGES / f"{code}.md").read_text())]


def convert(language: str, text: str) -> tuple[str, list[SourceFinding]]:
    if language == "yaml":
        return convert_yaml(text, "page.yaml")
    found = framework_findings(FileContext(text, "page.py"))
    return apply(text, [edit for finding in found for edit in finding.edits]), found


@pytest.mark.parametrize("code", CODES)
def test_page_shows_what_a_person_decides(code: str):
    assert any(block[0] == code and block[2] == "decide" for block in BLOCKS)


@pytest.mark.parametrize("index", [i for i, block in enumerate(BLOCKS) if block[2] == "before"])
def test_code_before_becomes_the_code_after_and_stays(index: int):
    code, language, _, text = BLOCKS[index]
    _, _, kind, expected = BLOCKS[index + 1]
    assert kind == "after"
    converted, found = convert(language, text)
    assert converted == expected
    assert (found[0].code, found[0].status) == (code, Status.REWRITTEN)
    assert convert(language, expected) == (expected, [])


@pytest.mark.parametrize(
    ("code", "language", "text"), [(c, lang, t) for c, lang, kind, t in BLOCKS if kind == "decide"]
)
def test_code_for_a_person_is_left_alone_with_a_fix(code: str, language: str, text: str):
    converted, found = convert(language, text)
    assert converted == text
    assert {(one.code, one.status) for one in found} == {(code, Status.NEEDS_DECISION)}
    assert all(one.fix for one in found)
