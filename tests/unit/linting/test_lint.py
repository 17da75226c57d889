"""lint(): files in, findings out; comments, settings, fixes and broken files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import ConfigError, SourceError
from shardwise.findings import Safety
from shardwise.linting.files import LintSettings
from shardwise.linting.lint import lint, lint_file, lint_text

WRONG = """\
import torch
from torch.distributed.fsdp import fully_shard

model = build()
optimizer = torch.optim.AdamW(model.parameters())
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
model.forward(x)
"""
SAFE = frozenset({Safety.SAFE})


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(WRONG)
    (tmp_path / "other.py").write_text("print('nothing of ours')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def codes(findings) -> list[str]:
    return [finding.code for finding in findings]


def test_findings_come_by_path_and_line(project: Path):
    (project / "again.py").write_text(WRONG)
    findings = lint(".")
    assert [(finding.path, finding.line, finding.code) for finding in findings] == [
        ("./again.py", 5, "SW201"),
        ("./again.py", 9, "SW229"),
        ("./train.py", 5, "SW201"),
        ("./train.py", 9, "SW229"),
    ]
    first = findings[0]
    assert (first.column, first.end_line, first.end_column) == (13, 5, 50)
    assert first.where == "./again.py:5:13"
    assert str(first).startswith("./again.py:5:13: error SW201: ")


def test_select_and_ignore_choose_rules(project: Path):
    assert codes(lint("train.py", select=["SW201"])) == ["SW201"]
    assert codes(lint("train.py", ignore=["SW201"])) == ["SW229"]
    assert codes(lint(["train.py"], select=["SW2"], ignore=["SW20"])) == ["SW229"]
    with pytest.raises(ConfigError, match="SW777"):
        lint("train.py", select=["SW777"])


def test_settings_of_the_project_hold_and_arguments_win(project: Path):
    (project / "pyproject.toml").write_text(
        '[tool.shardwise.lint]\nignore = ["SW229"]\n[tool.shardwise.lint.per-file-ignores]\n"old/*" = ["SW201"]\n'
    )
    (project / "old").mkdir()
    (project / "old" / "train.py").write_text(WRONG)
    assert [(finding.path, finding.code) for finding in lint(".")] == [("./train.py", "SW201")]
    assert codes(lint("train.py", select=["SW229"])) == []
    assert codes(lint("train.py", select=["SW2"])) == ["SW201"]


def test_noqa_on_the_first_or_last_line_of_the_code_counts():
    spread = WRONG.replace("AdamW(model.parameters())", "AdamW(\n    model.parameters(),\n)  # noqa: SW201")
    assert codes(lint_text(spread, "a.py", LintSettings()).findings) == ["SW229"]
    above = WRONG.replace("AdamW(model.parameters())", "AdamW(  # noqa: SW201\n    model.parameters()\n)")
    assert codes(lint_text(above, "a.py", LintSettings()).findings) == ["SW229"]
    whole = "# shardwise: noqa: SW201, SW229\n" + WRONG
    assert codes(lint_text(whole, "a.py", LintSettings()).findings) == []


def test_only_safe_fixes_are_applied_by_default(project: Path):
    (project / "train.py").write_text(
        WRONG + "from torch.distributed.fsdp import MixedPrecisionPolicy as P\nP(torch.bfloat16)\n"
    )
    linted = lint_file("train.py", LintSettings(), SAFE)
    assert linted is not None
    assert linted.num_fixed == 1
    text = (project / "train.py").read_text()
    assert "model(x)\n" in text
    assert "P(torch.bfloat16)\n" in text
    assert codes(linted.findings) == ["SW201", "SW211"]
    lint_file("train.py", LintSettings(), SAFE | {Safety.UNSAFE})
    assert "P(torch.bfloat16, reduce_dtype=torch.float32)\n" in (project / "train.py").read_text()


def test_fixes_keep_line_ends_encoding_and_everything_else(project: Path):
    text = "# coding: latin-1\r\n# café\r\n" + WRONG.replace("\n", "\r\n")
    (project / "train.py").write_bytes(text.encode("latin-1"))
    lint_file("train.py", LintSettings(), SAFE)
    assert (project / "train.py").read_bytes() == text.replace("model.forward(x)", "model(x)").encode("latin-1")


def test_a_file_is_not_written_without_a_fix(project: Path):
    before = (project / "other.py").stat().st_mtime_ns
    lint_file("other.py", LintSettings(), SAFE)
    lint(".")
    assert (project / "other.py").stat().st_mtime_ns == before
    assert (project / "train.py").read_text() == WRONG


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"import torch\nfully_shard(\n", 2),
        (b"# coding: utf-8\n\nx = '\xff'  # fully_shard\n", 3),
        (b"fully_shard = '\x00'\n", 1),
    ],
)
def test_files_that_cannot_be_read_are_findings(project: Path, data: bytes, line: int):
    (project / "broken.py").write_bytes(data)
    (finding,) = lint("broken.py")
    assert (finding.code, finding.line) == ("SW200", line)
    assert lint("broken.py", ignore=["SW200"]) == []


def test_a_file_nested_beyond_reason_is_a_finding_not_a_crash(project: Path):
    (project / "deep.py").write_text("fully_shard = " + "-" * 20_000 + "1\n")
    assert codes(lint("deep.py")) == ["SW200"]
    (project / "deep.py").write_text("fully_shard = " + "+".join(["1"] * 3_000) + "\n")
    assert codes(lint("deep.py")) in ([], ["SW200"])


def test_a_path_that_does_not_exist_is_refused(project: Path):
    with pytest.raises(SourceError, match=r"absent\.py"):
        lint(["train.py", "absent.py"])


def test_an_empty_file_and_an_empty_folder_have_no_findings(project: Path):
    (project / "empty").mkdir()
    (project / "empty" / "nothing.py").write_text("")
    assert lint("empty") == []


def test_progress_hears_of_every_file(project: Path):
    heard: list[object] = []

    class Recorder:
        def start(self, total: int, label: str) -> None:
            heard.append((total, label))

        def advance(self, steps: int = 1, note: str = "") -> None:
            heard.append(steps)

        def finish(self, note: str = "") -> None:
            heard.append("end")

    lint(".", progress=Recorder())
    assert heard == [(2, "lint"), 1, 1, "end"]


def test_many_files_are_linted_by_several_processes_in_the_order_of_their_paths(tmp_path: Path):
    for number in range(40):
        (tmp_path / f"f{number:02}.py").write_text(WRONG + "\n" + "x = 1  # filler\n" * 800)
    script = (
        "import sys\nfrom shardwise.linting.lint import lint\n"
        "from shardwise.source.files import can_fork\nassert can_fork()\n"
        f"found = lint({str(tmp_path)!r})\n"
        "assert 'torch' not in sys.modules\n"
        "print([(f.path[-6:], f.line) for f in found] == [(f'f{n:02}.py', l) for n in range(40) for l in (5, 9)])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")
