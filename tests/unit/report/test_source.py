"""Findings of source files as text, JSON, SARIF and GitHub commands."""

import io
import json

from rich.console import Console

from shardwise.findings import Edit, Safety, Severity, SourceFinding
from shardwise.report.source import findings_github, findings_json, findings_sarif, print_findings

TEXT = "a = 1\n\tb = model.forward(x,\n    y)\n"
FINDING = SourceFinding(
    code="SW229",
    name="forward-called-directly",
    message="forward() skips hooks: 100%, really",
    where="my dir/a.py:2:6",
    severity=Severity.ERROR,
    fix="call the model",
    path="my dir/a.py",
    line=2,
    column=6,
    end_line=3,
    end_column=7,
    safety=Safety.SAFE,
    edits=(Edit(start=16, end=24, text=""),),
)


class Described:
    code, name, summary = "SW229", "forward-called-directly", "A summary."


class Unused:
    code, name, summary = "SW230", "other", "Another."


def printed(finding: SourceFinding, **options) -> str:
    out = io.StringIO()
    print_findings(Console(file=out, width=40, **options), [finding], {finding.path: TEXT})
    return out.getvalue()


def test_text_has_the_place_the_code_frame_and_the_fix():
    assert printed(FINDING) == (
        "my dir/a.py:2:6 SW229 forward() skips hooks: 100%, really\n"
        "  2 |  b = model.forward(x,\n"
        "    |      ^^^^^^^^^^^^^^^^\n"
        "  3 |     y)\n"
        "    |     ^^\n"
        "  fix:  call the model [safe]\n"
    )


def test_text_has_colours_only_in_a_terminal():
    assert "\x1b[" not in printed(FINDING)
    assert "\x1b[" in printed(FINDING, force_terminal=True)


def test_brackets_in_messages_are_not_markup():
    finding = SourceFinding(code="SW1", message="use x[red] and [/]", path="a.py", line=9)
    assert "use x[red] and [/]" in printed(finding)


def test_json_has_every_field():
    content = json.loads(findings_json([FINDING], {"findings": 1}))
    assert content["summary"] == {"findings": 1}
    assert content["findings"] == [
        {
            "path": "my dir/a.py",
            "line": 2,
            "column": 6,
            "end_line": 3,
            "end_column": 7,
            "code": "SW229",
            "name": "forward-called-directly",
            "message": "forward() skips hooks: 100%, really",
            "fix": "call the model",
            "severity": "error",
            "safety": "safe",
            "edits": [{"start": 16, "end": 24, "text": ""}],
        }
    ]


def test_github_commands_escape_what_would_end_them():
    assert findings_github([FINDING]) == (
        "::error title=SW229 forward-called-directly,file=my dir/a.py,line=2,col=6,endLine=3,endColumn=7::"
        "forward() skips hooks: 100%25, really Fix: call the model"
    )
    odd = SourceFinding(code="SW1", message="two\nlines", path="a,b:c.py", line=1, severity=Severity.NOTE)
    assert findings_github([odd]) == "::notice title=SW1,file=a%2Cb%3Ac.py,line=1,col=1::two%0Alines"


def test_sarif_names_rules_places_and_safe_fixes():
    log = json.loads(findings_sarif([FINDING], [Described(), Unused()], version="1.2"))
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert (driver["name"], driver["version"]) == ("shardwise", "1.2")
    assert [rule["id"] for rule in driver["rules"]] == ["SW229"]
    (result,) = run["results"]
    assert (result["ruleId"], result["level"]) == ("SW229", "error")
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "my%20dir/a.py"
    assert place["region"] == {"startLine": 2, "startColumn": 6, "endLine": 3, "endColumn": 7}
    (replacement,) = result["fixes"][0]["artifactChanges"][0]["replacements"]
    assert replacement["deletedRegion"] == {"charOffset": 16, "charLength": 8}


def test_sarif_offers_no_unsafe_fix_and_may_be_empty():
    from dataclasses import replace

    log = json.loads(findings_sarif([replace(FINDING, safety=Safety.UNSAFE)]))
    assert "fixes" not in log["runs"][0]["results"][0]
    assert json.loads(findings_sarif([]))["runs"][0]["results"] == []
