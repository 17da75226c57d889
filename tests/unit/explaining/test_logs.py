"""Whole logs, of every launcher and in every dress: the right cause, of the right rank, or an honest "unknown"."""

import re
import time
from pathlib import Path

import pytest

from shardwise.explaining import explain

LOGS = sorted((Path(__file__).parent / "logs").glob("*.txt"))
EXPECT = re.compile(
    r"\A# expect: (?P<answer>SW\d{3}|unknown|none)(?: rank (?P<rank>\d+))?(?:: (?P<message>[^\n\r]+))?\r?\n"
)


def text_and_expectation(path: Path) -> tuple[str, re.Match[str]]:
    text = path.read_bytes().decode("utf-8", errors="replace")
    expected = EXPECT.match(text)
    assert expected is not None, path
    return text[expected.end() :], expected


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_log_is_explained(path: Path):
    text, expected = text_and_expectation(path)
    explanation = explain(text)
    answer = explanation.failure.code if explanation.failure else "unknown" if explanation.message else "none"
    assert (answer, explanation.rank) == (expected["answer"], expected["rank"] and int(expected["rank"])), explanation
    if answer == "unknown":
        assert explanation.message == expected["message"]
        assert expected["message"] in str(explanation)


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_the_line_named_holds_the_message(path: Path):
    text, expected = text_and_expectation(path)
    explanation = explain(text)
    if expected["answer"] == "none":
        assert explanation.line is None
        return
    assert explanation.line is not None
    there = text.split("\n")[explanation.line - 1 :]
    first_words = explanation.message.splitlines()[0][:30]
    assert first_words in "\n".join(there[:3])  # a message may continue below the type of the exception


def test_there_are_logs_of_every_kind():
    answers = [text_and_expectation(path)[1]["answer"] for path in LOGS]
    assert len(LOGS) >= 45
    assert answers.count("unknown") >= 10
    assert answers.count("none") >= 5


def test_a_launcher_summary_alone_asks_for_the_ranks_own_traceback():
    path = next(path for path in LOGS if path.stem == "summary-only")
    said = str(explain(text_and_expectation(path)[0]))
    assert "SW558 worker-died (rank 2" in said
    assert "traceback of the first rank that failed" in said


@pytest.mark.parametrize("line", ["step {i} | loss {loss:.4f}", "gpu01:{i}:{i} [0] NCCL INFO Channel {i}/0 : x{i:x}"])
def test_a_long_log_takes_seconds(line: str):
    rows = [f"[rank{i % 8}]: " + line.format(i=i, loss=3 - i * 1e-6) for i in range(200_000)]
    rows[150_000:150_000] = [
        "[rank5]: Traceback (most recent call last):",
        '[rank5]:   File "train.py", line 3, in <module>',
        "[rank5]: TypeError: Invariant encountered: value was None when it should not be",
    ]
    rows = [row for i, row in enumerate(rows) if i < 150_003 or not row.startswith("[rank5]")]
    started = time.process_time()
    explanation = explain("\n".join(rows))
    assert time.process_time() - started < 5
    assert explanation.failure is not None
    assert (explanation.failure.code, explanation.rank, explanation.line) == ("SW514", 5, 150_003)
