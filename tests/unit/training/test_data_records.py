"""Lines of JSON, each a document."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config.run import DataConfig
from shardwise.training.data.reading import DataSource, read_documents, to_document

LINES = st.lists(st.sampled_from(['{"text": "a"}', "", "  ", "\t", ' {"text": "é"} ', '{"text": "x y"}']), max_size=12)


@settings(max_examples=60, deadline=None)
@given(lines=LINES, end=st.sampled_from(["\n", "\r\n"]), closed=st.booleans())
def test_lines_are_found_and_numbered_as_an_editor_does(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: str, closed: bool
):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes((end.join(lines) + (end if closed else "")).encode())
    expected = [(number, json.loads(line)) for number, line in enumerate(lines, 1) if line.strip()]
    problems: list[str] = []
    found = read_documents(DataSource("jsonl", (path,)), None, DataConfig(), problems)
    assert [document.text for document in found] == [record["text"] for _, record in expected]
    assert not list(read_documents(DataSource("jsonl", (path,)), None, DataConfig(text_field="none"), problems))
    assert [problem.partition(": ")[0] for problem in problems] == [f"{path}:{number}" for number, _ in expected]


def test_files_follow_one_another(tmp_path: Path):
    paths = []
    for name, texts in (("a", ["1", "2"]), ("b", []), ("c", ["3"])):
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    found = read_documents(DataSource("jsonl", tuple(paths)), None, DataConfig(), [])
    assert [document.text for document in found] == ["1", "2", "3"]


def test_half_a_surrogate_pair_becomes_a_question_mark():
    r"""JSON may say "\ud83d", which is no character."""
    record = json.loads(r'{"text": "a\ud83db"}')
    assert to_document(record, DataConfig()).text == "a?b"


def test_a_prompt_with_a_response_goes_before_plain_text():
    record = {"text": "t", "prompt": "p", "response": "r"}
    assert to_document(record, DataConfig()).prompt == "p"
    assert to_document({**record, "q": "?", "a": "!"}, DataConfig(prompt_field="q", response_field="a")).text == "!"
    assert to_document(record, DataConfig(prompt_field="none")).text == "t"


MEASURE = """
import sys, threading
from shardwise.config.run import DataConfig
from shardwise.training.data import open_data

def anonymous_mib():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024

def watch():
    global peak
    while not done.wait(0.02):
        peak = max(peak, anonymous_mib())

settings = dict(batch_size=8, rank=0, num_ranks=1, seed=0, vocab_size=None, device="cpu")
open_data(DataConfig(), **settings)
peak = before = anonymous_mib()
done = threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
with open_data(DataConfig(source=sys.argv[1], pack=sys.argv[2] == "True"), **settings) as loader:
    for _ in range(20):
        next(loader)
    done.set()
    watcher.join()
    print(peak - before, loader.num_samples)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process where Linux tells it")
@pytest.mark.parametrize("pack", [True, False])
def test_memory_is_that_of_the_tokens_not_of_python_objects(tmp_path: Path, pack: bool):
    """60 MiB of JSON with 44 MiB of text: two bytes a token, where Python lists would take over 350 MiB."""
    path = tmp_path / "big.jsonl"
    line = json.dumps({"text": "some words " * 6, "id": 1})
    block = f"{line}\n" * 4096
    with path.open("w") as file:
        for _ in range((60 << 20) // len(block)):
            file.write(block)
    command = [sys.executable, "-c", MEASURE, str(path), str(pack)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=environment).stdout
    used_mib, num_samples = map(float, output.split())
    assert num_samples > 150_000
    assert used_mib < 3.2 * 44
