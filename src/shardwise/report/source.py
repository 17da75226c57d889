"""Findings in source files as text with code frames, JSON, SARIF 2.1.0 and GitHub annotations.

Used by `lint` and `migrate`. This module reads no files: code frames come from the given texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.text import Text

from shardwise.findings import Safety, Severity, SourceFinding

_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}
_GITHUB = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}
_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_MAX_FRAME_LINES = 4


def print_findings(console: Console, findings: Iterable[SourceFinding], texts: Mapping[str, str] | None = None) -> None:
    """Print each finding as `path:line:column CODE message`, its code frame if its text is given, and its fix."""
    for finding in findings:
        console.print(finding_text(finding, (texts or {}).get(finding.path)), soft_wrap=True, highlight=False)


def finding_text(finding: SourceFinding, text: str | None = None) -> Text:
    """Render one finding as text; if the file's text is given, with the lines of the finding."""
    out = Text()
    out.append(f"{finding.path}:{finding.line}:{finding.column}", style="bold")
    out.append(f" {finding.code} ", style=f"bold {_COLOURS[finding.severity]}")
    out.append(finding.message)
    for line in _frame(finding, text) if text is not None else []:
        out.append("\n").append(line)
    if finding.fix:
        out.append(f"\n  {'fix:':<5} ", style="bold green").append(finding.fix)
        if finding.edits:
            out.append(f" [{finding.safety.value}]", style="green")
    return out


def _frame(finding: SourceFinding, text: str) -> list[Text]:
    """Return the finding's lines with line numbers, with the code underlined."""
    lines = text.split("\n")
    last = min(max(finding.end_line, finding.line), finding.line + _MAX_FRAME_LINES - 1, len(lines))
    width = len(str(last))
    frame = []
    for number in range(finding.line, last + 1):
        code = lines[number - 1].rstrip("\r").expandtabs(1)
        frame.append(Text.assemble((f"  {number:>{width}} | ", "blue"), code))
        start = finding.column - 1 if number == finding.line else len(code) - len(code.lstrip())
        end = finding.end_column - 1 if number == finding.end_line else len(code)
        if number == finding.line or finding.end_line > finding.line:
            marks = "^" * max(1, end - start)
            frame.append(Text.assemble((f"  {'':>{width}} | ", "blue"), " " * start, (marks, "red")))
    return frame


def finding_dict(finding: SourceFinding) -> dict[str, Any]:
    """Return one finding as plain values."""
    fields = ("path", "line", "column", "end_line", "end_column", "code", "name", "message", "fix")
    return {
        **{name: getattr(finding, name) for name in fields},
        "severity": finding.severity.value,
        "safety": finding.safety.value,
        "edits": [asdict(edit) for edit in finding.edits],
    }


def findings_json(findings: Sequence[SourceFinding], summary: Mapping[str, Any]) -> str:
    """Return findings and a summary as one JSON object."""
    return json.dumps({"findings": [finding_dict(one) for one in findings], "summary": dict(summary)}, indent=2)


def findings_github(findings: Iterable[SourceFinding]) -> str:
    """Return one workflow command per finding, which GitHub shows in a pull request."""
    lines = []
    for finding in findings:
        title, path = f"{finding.code} {finding.name}".strip(), PurePath(finding.path).as_posix()
        properties = {"title": title, "file": path, "line": finding.line, "col": finding.column} | _end(finding)
        listed = ",".join(f"{name}={_escaped(str(value), ',:')}" for name, value in properties.items())
        lines.append(f"::{_GITHUB[finding.severity]} {listed}::{_escaped(_message(finding))}")
    return "\n".join(lines)


def _message(finding: SourceFinding) -> str:
    return finding.message + (f" Fix: {finding.fix}" if finding.fix else "")


def _end(finding: SourceFinding) -> dict[str, int]:
    return {"endLine": finding.end_line, "endColumn": finding.end_column} if finding.end_line else {}


def _escaped(text: str, more: str = "") -> str:
    for character in "%\r\n" + more:  # the percent sign first, because the others introduce new ones
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def findings_sarif(findings: Sequence[SourceFinding], rules: Iterable[Any] = (), *, version: str = "") -> str:
    """Return a SARIF 2.1.0 log of one run; it describes the rules of the findings by code, name and summary."""
    hit = {finding.code for finding in findings}
    described = [
        {"id": rule.code, "name": rule.name, "shortDescription": {"text": rule.summary}}
        for rule in rules
        if rule.code in hit
    ]
    driver = {"name": "shardwise", "version": version, "rules": described}
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_sarif_result(finding) for finding in findings],
    }
    return json.dumps({"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _sarif_result(finding: SourceFinding) -> dict[str, Any]:
    uri = {"uri": quote(PurePath(finding.path).as_posix())}
    region = {"startLine": finding.line, "startColumn": finding.column} | _end(finding)
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "level": finding.severity.value,
        "message": {"text": _message(finding)},
        "locations": [{"physicalLocation": {"artifactLocation": uri, "region": region}}],
        "properties": {"safety": finding.safety.value, "status": finding.status.value},
    }
    if finding.edits and finding.safety is Safety.SAFE:  # SARIF consumers apply all edits listed here
        replacements = [
            {
                "deletedRegion": {"charOffset": edit.start, "charLength": edit.end - edit.start},
                "insertedContent": {"text": edit.text},
            }
            for edit in finding.edits
        ]
        change = {"artifactLocation": uri, "replacements": replacements}
        result["fixes"] = [{"description": {"text": finding.fix}, "artifactChanges": [change]}]
    return result
