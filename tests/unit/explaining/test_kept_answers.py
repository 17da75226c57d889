"""Every log's answer to the letter: code, message, rank, line and what followed from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.explaining import explain
from tests.golden import same_as_kept
from tests.unit.explaining.test_explain import MESSAGES
from tests.unit.explaining.test_logs import LOGS, text_and_expectation


def answer(text: str) -> dict[str, object]:
    found = explain(text).to_dict()
    return {name: found[name] for name in ("code", "message", "rank", "line", "echoes")}


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_answers(path: Path):
    same_as_kept("answers", path.stem, answer(text_and_expectation(path)[0]))


@pytest.mark.parametrize("code", sorted(MESSAGES))
def test_answers_to_single_messages(code: str):
    same_as_kept("answers", code, answer(MESSAGES[code]))
    same_as_kept(
        "answers", f"{code} of rank 3", answer("step 1\n[rank3]: " + MESSAGES[code].replace("\n", "\n[rank3]: "))
    )


OF_TWO_RANKS = {
    "traceback": 'Traceback (most recent call last):\n  File "a.py", line 3, in f\nmine.OddError: the moon is full',
    "bare line": "mine.FlatError: the tide is low",
    "cause": MESSAGES["SW502"],
    "echo": MESSAGES["SW553"],
    "warning": MESSAGES["SW506"],
    "launcher": MESSAGES["SW558"],
}


@pytest.mark.parametrize("first", OF_TWO_RANKS)
@pytest.mark.parametrize("second", OF_TWO_RANKS)
def test_answers_to_the_failures_of_two_ranks(first: str, second: str):
    """A cause comes before an echo of it, whichever stands first in the log; so does a traceback nobody knows."""
    texts = [
        "\n".join(f"[rank{rank}]: {line}" for line in OF_TWO_RANKS[name].splitlines())
        for rank, name in ((1, first), (0, second))
    ]
    same_as_kept("answers", f"{first} of rank 1, {second} of rank 0", answer("step 1\n" + "\n".join(texts)))


def test_the_page_of_a_known_error():
    explanation = explain(
        "[rank2]: RuntimeError: aten.addmm.default: got mixed torch.Tensor and DTensor, need to convert"
    )
    lines = str(explanation).splitlines()
    failure = explanation.failure
    assert failure is not None
    assert lines[0].startswith(f"SW502 {failure.name}")
    assert lines[0].endswith("(rank 2, line 1)")
    assert lines[1] == failure.what.splitlines()[0]
    assert f"  message: {explanation.message}" in lines
    assert any(line.startswith("  why:     ") for line in lines)
    assert any(line.startswith("  fix:     ") for line in lines)
    assert f"  torch:   {failure.torch}" in lines
    assert [line for line in lines if line.startswith("  see:     ")] == [f"  see:     {s}" for s in failure.sources]
    assert any(line.startswith("  with shardwise: ") for line in lines) == bool(failure.with_shardwise)
    found = explanation.to_dict()
    assert {name: found[name] for name in ("code", "name", "what", "why", "fix", "torch", "sources")} == {
        "code": "SW502", "name": failure.name, "what": failure.what, "why": failure.why, "fix": failure.fix,
        "torch": failure.torch, "sources": list(failure.sources),
    }  # fmt: skip


def command(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "shardwise.cli.main", "explain", *arguments]
    return subprocess.run(line, input=given, capture_output=True, text=True, timeout=120)


def test_the_command_reads_standard_input_and_says_what_is_unknown():
    text = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\nmine.OddError: the moon is full\n'
    result = command("--format", "json", given=text)
    assert result.returncode == 1
    assert json.loads(result.stdout) == {
        "code": None, "message": "mine.OddError: the moon is full", "rank": None, "line": 3, "echoes": [],
    }  # fmt: skip


def test_the_command_refuses_what_is_no_file(tmp_path: Path):
    result = command(str(tmp_path / "absent"))
    assert result.returncode == 2
    assert "is neither a code nor a file" in result.stderr


def test_the_command_prints_the_page_of_a_rule():
    result = command("sw201", "--format", "json")
    assert result.returncode == 0
    found = json.loads(result.stdout)
    assert found["code"] == "SW201"
    assert found["page"].lstrip("-\n").strip()
