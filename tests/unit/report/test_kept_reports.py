"""Findings, migrations and progress as people and machines get them, to the letter, of made-up findings."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from shardwise.findings import Edit, Safety, Severity, SourceFinding, Status
from shardwise.fsdp1.codemod.migrate import MigratedFile, Migration
from shardwise.linting.registry import all_rules
from shardwise.report.source import findings_github, findings_json, findings_sarif, print_findings
from shardwise.report.terminal import print_migration, progress_on
from tests.golden import same_as_kept

TEXT = "import a\n\tx = f(1,\n      2,\n\n      3)\ny = [\n    1,\n    2,\n    3,\n    4,\n]\nlast"


def finding(code: str, line: int, column: int = 1, **more: Any) -> SourceFinding:
    path = more.pop("path", "a dir/x.py")
    message = more.pop("message", f"message of {code}")
    return SourceFinding(
        code=code, message=message, where=f"{path}:{line}:{column}", path=path, line=line, column=column, **more
    )


FINDINGS = [
    finding("SW201", 1, 3, end_line=1, end_column=7, name="one-line", severity=Severity.ERROR, fix="do: this, 100%"),
    finding("SW202", 2, 6, end_line=5, end_column=9, name="four-lines", fix="that", safety=Safety.SAFE,
            edits=(Edit(start=3, end=9, text="new\n"),)),
    finding("SW203", 6, 5, end_line=11, end_column=2, name="more-lines", severity=Severity.NOTE,
            edits=(Edit(start=1, end=1, text=""),), safety=Safety.UNSAFE, fix="perhaps"),
    finding("SW204", 12, 1, message="two\nlines, 5% off: here"),
    finding("SW205", 12, 2, path="other.py", status=Status.NEEDS_DECISION),
]  # fmt: skip


def drawn(show: Any, **options: Any) -> list[str]:
    file = io.StringIO()
    show(Console(file=file, width=100, color_system=None, **options))
    return file.getvalue().splitlines()


def test_text_with_frames():
    same_as_kept("reports", "text", drawn(lambda out: print_findings(out, FINDINGS, {"a dir/x.py": TEXT})))
    same_as_kept("reports", "text without files", drawn(lambda out: print_findings(out, FINDINGS)))


def test_machines():
    same_as_kept("reports", "json", json.loads(findings_json(FINDINGS, {"files": 2})))
    same_as_kept("reports", "github", findings_github(FINDINGS).splitlines())
    rules = [rule for code, rule in all_rules().items() if code in ("SW201", "SW211")]
    found = json.loads(findings_sarif(FINDINGS, rules, version="9.9"))
    for rule in found["runs"][0]["tool"]["driver"]["rules"]:
        assert rule.pop("shortDescription")["text"]
        assert rule.pop("name")
    same_as_kept("reports", "sarif", found)


@pytest.mark.parametrize("written", [False, True])
def test_migrations(written: bool):
    moved = [
        finding("SW101", 3, status=Status.REWRITTEN, path="a.py"),
        finding("SW102", 4, status=Status.REWRITTEN, path="a.py", fix="see"),
        finding("SW103", 5, status=Status.NEEDS_DECISION, path="b.py", fix="choose"),
        finding("SW104", 6, path="b.py"),
    ]
    files = (
        MigratedFile(path="a.py", before="one\ntwo\nthree\n", output="one\n2\nthree\nfour", findings=tuple(moved[:2])),
        MigratedFile(path="b.py", before="same\n", output="same\n", findings=tuple(moved[2:])),
    )
    kept = drawn(lambda out: print_migration(out, Migration(files=files, num_read=5), written=written))
    same_as_kept("reports", f"migration, written {written}", kept)
    empty = drawn(lambda out: print_migration(out, Migration(files=(), num_read=0), written=written))
    same_as_kept("reports", f"migration of nothing, written {written}", empty)


def lines_of(total: int, steps: list[int], **options: Any) -> list[str]:
    def show(out: Console) -> None:
        with progress_on(out, **options) as progress:
            progress.start(total, "work")
            for index, number in enumerate(steps):
                progress.advance(number, note=f"n{index}")
            progress.finish("end")

    return drawn(show)


@pytest.mark.parametrize(
    ("total", "steps", "expected"),
    [
        (4, [1, 1, 1, 1], ["1/4", "2/4", "3/4", "4/4"]),
        (20, [1] * 20, ["1/20", "2/20", "4/20", "6/20", "8/20", "10/20", "12/20", "14/20", "16/20", "18/20", "20/20"]),
        (100, [9, 1, 5, 85], ["9/100", "10/100", "100/100"]),
        (0, [1, 1], ["1/0", "2/0"]),
        (30, [1, 1, -2, 3], ["1/30", "3/30"]),
    ],
    ids=["few", "twenty", "jumps", "unknown", "back"],
)
def test_lines_in_a_pipe(total: int, steps: list[int], expected: list[str]):
    found = lines_of(total, steps)
    assert found[-1] == "end"
    assert [line.split()[1] for line in found[:-1]] == expected
    assert all(line.split()[0] == "work" and line.split()[2].startswith("n") for line in found[:-1])


def test_lines_of_bytes_in_a_pipe():
    found = lines_of(2048, [1024, 1024], in_bytes=True)
    assert [line.partition(", ")[0] for line in found] == ["work 1 KiB of 2 KiB", "work 2 KiB of 2 KiB", "end"]
    assert all(line.rstrip("n0123456789 ").endswith("/s") for line in found[:-1])
