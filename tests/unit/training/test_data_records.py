"""Lines of JSON, found by their offsets."""

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
from shardwise.training.data.records import Documents, JsonLines, to_document

LINES = st.lists(st.sampled_from(['{"text": "a"}', "", "  ", "\t", ' {"text": "é"} ', '{"text": "x y"}']), max_size=12)


@settings(max_examples=60, deadline=None)
@given(lines=LINES, end=st.sampled_from(["\n", "\r\n"]), closed=st.booleans())
def test_lines_are_found_and_numbered_as_an_editor_does(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: str, closed: bool
):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes((end.join(lines) + (end if closed else "")).encode())
    found = JsonLines(path)
    expected = [(number, json.loads(line)) for number, line in enumerate(lines, 1) if line.strip()]
    assert [found[index] for index in range(len(found))] == [record for _, record in expected]
    assert [found.place(index) for index in range(len(found))] == [f"{path}:{number}" for number, _ in expected]


def test_files_follow_one_another(tmp_path: Path):
    parts = []
    for name, texts in (("a", ["1", "2"]), ("b", []), ("c", ["3"])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
        parts.append((str(path), JsonLines(path)))
    documents = Documents(parts, DataConfig())
    assert [documents[index].text for index in range(len(documents))] == ["1", "2", "3"]
    assert documents.place(2) == f"{tmp_path}/c.jsonl:1"


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
@pytest.mark.parametrize(("pack", "most_mib"), [(True, 2.2 * 44), (False, 36)])
def test_memory_is_that_of_the_text_not_of_python_objects(tmp_path: Path, pack: bool, most_mib: float):
    """60 MiB of JSON with 44 MiB of text: its tokens as Python lists would take over 350 MiB."""
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
    assert used_mib < most_mib
