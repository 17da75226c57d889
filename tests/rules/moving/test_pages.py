"""The pages of migrate's findings are their tests: what they say is rewritten, left alone or left to a person is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwise.findings import Status
from shardwise.fsdp1.codemod.draft import finding_kinds
from shardwise.fsdp1.codemod.migrate import Migration, migrate

PAGES = Path(__file__).parents[3] / "docs" / "rules"
CODES = sorted(code for code in finding_kinds() if code <= "SW180")
_BLOCK = re.compile(r"```python (before|after|unchanged|decide|reported)\n(.*?)```", re.DOTALL)


def blocks(code: str) -> list[tuple[str, str]]:
    return _BLOCK.findall((PAGES / f"{code}.md").read_text())


def run(text: str, folder: Path) -> Migration:
    (folder / "program.py").write_text(text)
    return migrate([folder / "program.py"], num_processes=1)


def occurs(piece: str, text: str) -> bool:
    return piece.rstrip("\n") in text


@pytest.mark.parametrize("code", CODES)
def test_page_holds(code: str, tmp_path: Path):
    found = blocks(code)
    assert any(kind in ("before", "decide", "reported") for kind, _ in found), "a page shows what it is about"
    for index, (kind, text) in enumerate(found):
        result = run(text, tmp_path)
        statuses = {(finding.code, finding.status) for finding in result.findings}
        match kind:
            case "unchanged":
                assert not any(file.changed for file in result.files)
                assert code not in {one for one, _ in statuses}
            case "before":
                assert (code, Status.REWRITTEN) in statuses
                output = result.files[0].output
                assert occurs(found[index + 1][1], output), output
                again = run(output, tmp_path)
                assert not any(file.changed for file in again.files), "a second run changes nothing"
            case "reported":
                assert (code, Status.REPORTED) in statuses
            case "decide":
                assert (code, Status.NEEDS_DECISION) in statuses
                assert all(finding.fix for finding in result.findings if finding.status is Status.NEEDS_DECISION)


def test_every_code_that_migrate_writes_has_a_page():
    sources = (PAGES.parents[1] / "src/shardwise/fsdp1/codemod").glob("*.py")
    written = {code for file in sources for code in re.findall(r'"(SW\d+)"', file.read_text())}
    assert written == set(finding_kinds())
