"""Codes' side of the contract: what each SWnnn is called and how grave it is, as findings and pages show it."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shardwise as sw
from tests.contract.command_line import ROOT
from tests.contract.outputs import DOCTORED, Work

_CODE = re.compile(r"SW\d{3}")
_TITLE = re.compile(r"^# (SW\d{3}) (\S+)$", re.MULTILINE)
_BLOCK = re.compile(r"^```(python|yaml) (bad|before|decide|reported)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_ROW = re.compile(r"^\| (SW\d{3}(?:, SW\d{3})*) \| (.*?) \|$", re.MULTILINE)


def describe_codes(work: Work, checks: dict[str, str]) -> dict[str, Any]:
    """Every code: those of pages by name, with what their own examples give; all others by what they mean.

    Args:
        work: Checkpoints to verify, and a folder to write into.
        checks: Codes of `sw.check`, with the severity that they had on real ranks.
    """
    return {
        "rules": _rules(work.folder / "pages"),
        "errors": _errors(),
        "meanings": dict(_meanings()),
        "severities": {**checks, **dict(_provoked(work))},
        "in the sources": dict.fromkeys(sorted(_in_sources()), ""),
    }


def _rules(folder: Path) -> dict[str, Any]:
    """Names by page; severity, safety and status by linting and migrating the page's examples of wrong code."""
    folder.mkdir()
    described: dict[str, Any] = {}
    for page in sorted((ROOT / "docs" / "rules").glob("SW*.md")):
        text = page.read_text(encoding="utf-8")
        title = _TITLE.search(text)
        assert title is not None, f"{page.name} has no title"
        described[title[1]] = {"name": title[2]}
        for number, (language, kind, code) in enumerate(_BLOCK.findall(text)):
            target = folder / kind / f"{title[1]}_{number}.{'py' if language == 'python' else 'yaml'}"
            target.parent.mkdir(exist_ok=True)
            target.write_text(code)
    seen: dict[str, dict[str, set[str]]] = {}
    for finding in sw.lint([folder / "bad"], preview=True):
        facts = seen.setdefault(finding.code, {})
        facts.setdefault("severity", set()).add(finding.severity.value)
        facts.setdefault("safety", set()).add(finding.safety.value)
        facts.setdefault("found as", set()).add(finding.name)
    for kind in ("before", "decide", "reported"):
        # One by one: files given together are read as one program.
        for file in sorted((folder / kind).iterdir()):
            for finding in sw.migrate([file], num_processes=1).findings:
                if file.name.startswith(finding.code):
                    facts = seen.setdefault(finding.code, {})
                    facts.setdefault("status", set()).add(finding.status.value)
                    facts.setdefault("found as", set()).add(finding.name)
    for code, facts in seen.items():
        described.setdefault(code, {}).update({name: ", ".join(sorted(values)) for name, values in facts.items()})
    return described


def _errors() -> dict[str, Any]:
    described = {}
    for page in sorted((ROOT / "docs" / "errors").glob("SW*.md")):
        explanation = sw.explain(page.stem)
        failure = explanation.failure
        assert failure is not None, f"{page.stem} is not explained"
        by_name = sw.explain(failure.alias).failure if failure.alias else None
        described[page.stem] = {
            "name": explanation.to_dict()["name"],
            "kind": failure.kind,
            "alias": failure.alias if by_name is not None and by_name.code == page.stem else "",
        }
    return described


def _meanings() -> Iterator[tuple[str, str]]:
    """What the tables on the pages say about codes that have no page of their own."""
    for page in sorted((ROOT / "docs").glob("*.md")):
        for codes, meaning in _ROW.findall(page.read_text(encoding="utf-8")):
            for code in codes.split(", "):
                yield code, meaning


def _provoked(work: Work) -> Iterator[tuple[str, str]]:
    """Findings of `verify` and `inspect` on damaged checkpoints, and of `doctor` in an odd environment."""
    broken = (work.flipped, work.missing, work.foreign, work.garbage, work.shared)
    found = [finding for path in broken for finding in sw.verify_checkpoint(path)]
    found += sw.inspect_checkpoint(work.numbered).findings
    yield from ((finding.code, finding.severity.value) for finding in found)
    for finding in work.doctored()["findings"]:
        if any(name in finding["message"] for name in DOCTORED):
            yield finding["code"], finding["severity"]


def _in_sources() -> Iterator[str]:
    """Codes that stand in the package as text of their own: a code that appears or goes is noticed."""
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _CODE.fullmatch(node.value):
                yield node.value


def read_checks(path: Path) -> dict[str, str]:
    """What `samples.py` found with `sw.check` on its ranks."""
    return json.loads(path.read_text())
