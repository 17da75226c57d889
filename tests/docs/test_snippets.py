"""The code on the pages runs, and prints what the page says it prints."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_TIMEOUT_S = 300


@dataclass(frozen=True)
class Snippet:
    """A block marked `python run`, and the `text` block after it, if there is one."""

    code: str
    num_ranks: int | None
    """None: in this process, without a process group."""
    expected: str | None


def snippets_of(text: str) -> list[Snippet]:
    """The blocks of a page that run, in order."""
    blocks = _FENCE.findall(text)
    found = []
    for (kind, code), (next_kind, next_text) in zip(blocks, [*blocks, ("", "")][1:], strict=True):
        if match := re.fullmatch(r"python run(?: ranks=(\d+))?", kind):
            expected = next_text if next_kind == "text" else None
            found.append(Snippet(code, int(match[1]) if match[1] else None, expected))
    return found


def joined(snippets: list[Snippet]) -> str:
    """One script of all, which prints a line between them, so that outputs can be told apart."""
    return "".join(f"{snippet.code}\nprint({_mark(i)!r}, flush=True)\n" for i, snippet in enumerate(snippets))


def check_outputs(output: str, snippets: list[Snippet]) -> None:
    for index, snippet in enumerate(snippets):
        printed, _, output = output.partition(f"{_mark(index)}\n")
        if snippet.expected is not None:
            assert printed == snippet.expected, f"after:\n{snippet.code}"


def _mark(index: int) -> str:
    return f"--- end of snippet {index} ---"


WITH_LOCAL = [page for page in PAGES if any(s.num_ranks is None for s in snippets_of(page.read_text()))]
WITH_RANKS = [page for page in PAGES if any(s.num_ranks for s in snippets_of(page.read_text()))]


@pytest.mark.parametrize("page", WITH_LOCAL, ids=lambda page: page.name)
def test_page_runs_in_one_process(page: Path):
    snippets = [snippet for snippet in snippets_of(page.read_text()) if snippet.num_ranks is None]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(joined(snippets), str(page), "exec"), {"__name__": "__main__"})
    check_outputs(printed.getvalue(), snippets)


_LONG = {"composition.md", "training.md", "tutorial.md", "diagnosing.md", "checkpoints.md"}


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.name, marks=[pytest.mark.slow] * (page.name in _LONG)) for page in WITH_RANKS]
)
def test_page_runs_on_ranks(page: Path, tmp_path: Path):
    snippets = [snippet for snippet in snippets_of(page.read_text()) if snippet.num_ranks]
    (num_ranks,) = {snippet.num_ranks or 1 for snippet in snippets}
    # Every rank prints the marks; what is compared is what rank 0 printed.
    quiet = "import builtins, os\nif os.environ['RANK'] != '0':\n    builtins.print = lambda *a, **k: None\n"
    check_outputs(run_on_ranks(quiet + joined(snippets), tmp_path, num_ranks), snippets)


def run_on_ranks(script: str, folder: Path, num_ranks: int) -> str:
    """What a script prints when torchrun starts it."""
    # gloo's threads now and then abort an interpreter that shuts down ("terminate called without an active exception"),
    # in plain torch scripts too; so ranks end without shutting it down.
    (folder / "train.py").write_text(script + "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_ranks),
    ]
    return run_in(folder, [*command, "train.py"])


def run_in(folder: Path, command: list[str]) -> str:
    """What a command prints, run in a folder with this repository's sources on the path."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    text = re.sub(r"\A---\n.*?^---\n", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)  # a head holds patterns
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_snippets_are_found_with_their_output():
    fence = "```"
    text = f"{fence}python run\na\n{fence}\n{fence}text\nout\n{fence}\n{fence}python run ranks=2\nb\n{fence}\n"
    assert snippets_of(text) == [Snippet("a\n", None, "out\n"), Snippet("b\n", 2, None)]


def test_wrong_output_is_noticed():
    snippet = Snippet("print('a')", None, "b\n")
    with pytest.raises(AssertionError, match="after"):
        check_outputs(f"a\n{_mark(0)}\n", [snippet])
